// What is said of a classifier's probabilities: the general class first, then the kind within it, or "unsure".
// The same as penstock/core/recognition.py, and as what penstock watch shows; shared examples hold both to it.

const TOP = 5;

export class Recognition {
  /** Of pack.json's `recognition`. */
  constructor({ labels, groups, unsure_below, half_life_s, enter, leave }) {
    Object.assign(this, { labels, groups: groups ?? labels, unsureBelow: unsure_below, halfLifeS: half_life_s, enter, leave });
    this.names = [...new Set(this.groups)];
    this.groupOf = this.groups.map((name) => this.names.indexOf(name));
  }

  /** What is said of one picture. */
  answer(probabilities) {
    const sums = this.sums(probabilities);
    const group = largest(sums);
    const sure = sums[group] >= this.unsureBelow;
    return this.said(probabilities, sums, group, sure);
  }

  /** The probability of each general class, in the order in which their labels come. */
  sums(probabilities) {
    const sums = new Array(this.names.length).fill(0);
    this.groupOf.forEach((group, index) => (sums[group] += probabilities[index]));
    return sums;
  }

  /** The answer where `group` is the class that is named, or only the likeliest. */
  said(probabilities, sums, group, sure) {
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

/** Where the largest number stands; of equals, the first. */
export function largest(numbers) {
  let best = 0;
  for (let index = 1; index < numbers.length; index++) if (numbers[index] > numbers[best]) best = index;
  return best;
}

/** Where the `most` largest numbers stand, largest first; equals in their order. */
export function likeliest(numbers, most) {
  return Array.from(numbers.keys())
    .sort((a, b) => numbers[b] - numbers[a] || a - b)
    .slice(0, most);
}
