// How loud it is: the root of the mean square and the peak, in decibels of full scale.

import { element, write } from "./dom.js";

const LOWEST_DB = -60;

export class Level {
  constructor() {
    this.rms = element("i", { className: "rms" });
    this.peak = element("i", { className: "peak" });
    const aria = { label: "Level", valuemin: LOWEST_DB, valuemax: 0 };
    this.meter = element("div", { className: "level", role: "meter", aria }, this.rms, this.peak);
    this.text = element("p", { className: "level-text", aria: { hidden: true } });
    this.view = element("div", {}, this.meter, this.text);
    this.clear();
  }

  /** Shows a level, both as shares of full scale. */
  show({ rms, peak }) {
    this.#show(decibels(rms), decibels(peak));
  }

  clear() {
    this.#show(-Infinity, -Infinity);
    write(this.text, "level: nothing is heard yet");
  }

  #show(rmsDb, peakDb) {
    const said = `${spelled(rmsDb)} dB, peak ${spelled(peakDb)} dB`;
    this.rms.style.transform = `scaleX(${share(rmsDb)})`;
    this.peak.style.left = `${100 * share(peakDb)}%`;
    this.meter.toggleAttribute("data-clipped", peakDb > -0.1);
    this.meter.setAttribute("aria-valuenow", Math.round(Math.max(LOWEST_DB, rmsDb)));
    this.meter.setAttribute("aria-valuetext", said);
    write(this.text, `level ${said}`);
  }
}

const decibels = (amplitude) => 20 * Math.log10(amplitude);
const share = (db) => Math.min(1, Math.max(0, 1 - db / LOWEST_DB));
const spelled = (db) => (db < LOWEST_DB ? `below −${-LOWEST_DB}` : `${db < -0.5 ? "−" : ""}${Math.abs(Math.round(db))}`);
