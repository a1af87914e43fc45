// Turn a classifier's probabilities into an answer: a group, a label within the group, or "unsure".
// The same as penstock/core/recognition.py; shared examples test both.

const TOP = 5;

export class Recognition {
  /** From pack.json's `recognition`. */
  constructor({ labels, groups, unsure_below, half_life_s, enter, leave }) {
    Object.assign(this, { labels, groups: groups ?? labels, unsureBelow: unsure_below, halfLifeS: half_life_s, enter, leave });
    this.names = [...new Set(this.groups)];
    this.groupOf = this.groups.map((name) => this.names.indexOf(name));
  }

  /** The answer for one picture. */
  answer(probabilities) {
    const sums = this.sums(probabilities);
    const group = largest(sums);
    const sure = sums[group] >= this.unsureBelow;
    return this.answerWithGroup(probabilities, sums, group, sure);
  }

  /** The summed probability of each group. */
  sums(probabilities) {
    const sums = new Array(this.names.length).fill(0);
    this.groupOf.forEach((group, index) => (sums[group] += probabilities[index]));
    return sums;
  }

  /** The answer for a group that is already chosen; `sure`: whether it is named. */
  answerWithGroup(probabilities, sums, group, sure) {
    const kind = largest(this.groupOf.map((other, index) => (other === group ? probabilities[index] : -Infinity)));
    const named = sure && probabilities[kind] >= this.unsureBelow * sums[group];
    return {
      label: named ? this.labels[kind] : null,
      group: sure ? this.names[group] : null,
      probability: probabilities[kind],
      group_probability: sums[group],
      unsure: !sure,
      top: likeliest(probabilities, TOP).map((index) => [this.labels[index], probabilities[index]]),
    };
  }
}

/** Index of the largest number; of equals, the first. */
export function largest(numbers) {
  let best = 0;
  for (let index = 1; index < numbers.length; index++) if (numbers[index] > numbers[best]) best = index;
  return best;
}

/** Indices of the `count` largest numbers, largest first; equals in order. */
export function likeliest(numbers, count) {
  return Array.from(numbers.keys())
    .sort((a, b) => numbers[b] - numbers[a] || a - b)
    .slice(0, count);
}
