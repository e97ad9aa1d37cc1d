// The mesh as the kernel tells it: its layout, which rarely changes, and what its ranks do at the moment. Both are columns
// over positions; `rank` names a position. A tile stands for the positions `from` up to `to`.
import { memory, nameRanks, rate, sum } from "./parts.js";

// letter on the wire: what it is called, and its icon; in the order of concern
export const STATES = {
  D: ["dead", "M4 4l8 8M12 4l-8 8"],
  U: ["silent", "M5.5 6a2.5 2.5 0 1 1 3.6 2.2Q8 8.8 8 10M8 12.4v.2"],
  T: ["stopped", "M4.5 4.5h7v7h-7z"],
  P: ["stopped in pdb", "M5.5 7a2.5 2.5 0 0 1 5 0v3a2.5 2.5 0 0 1-5 0zM5.5 8.5H3M13 8.5h-2.5M5.7 6L4 4.2M10.3 6L12 4.2M5.7 11L4 12.6M10.3 11l1.7 1.6"],
  X: ["interrupted, still busy", "M8 3v6M8 12v.4"],
  S: ["starting", "M4 8h.3M8 8h.3M12 8h.3"],
  C: ["in a collective", "M6.8 9.2a2.4 2.4 0 0 1 0-3.4l1.6-1.6a2.4 2.4 0 0 1 3.4 3.4l-.9.9M9.2 6.8a2.4 2.4 0 0 1 0 3.4l-1.6 1.6a2.4 2.4 0 0 1-3.4-3.4l.9-.9"],
  B: ["busy", "M5.5 3.8l6.5 4.2-6.5 4.2z"],
  I: ["idle", "M6 4.5v7M10 4.5v7"],
};
export const ORDER = Object.keys(STATES);
const WORKING = ["B", "C", "X", "P", "T", "U"];

export class Mesh {
  constructor(layout, live) {
    this.layout = layout;
    this.live = live;
    this.count = layout.pids.length;
    this.rank = (position) => layout.ranks[position] ?? position;
  }

  get isWorking() {
    return this.live.cells.length > 0 || WORKING.some((letter) => this.live.states.includes(letter));
  }

  get all() {
    return { from: 0, to: this.count };
  }

  countStates({ from, to }) {
    const counts = {};
    for (let i = from; i < to; i++) counts[this.live.states[i]] = (counts[this.live.states[i]] || 0) + 1;
    return counts;
  }

  stateOf(position) {
    return STATES[this.live.states[position]][0];
  }

  // Where a rank is, or why it ended.
  whereOf(position) {
    return this.live.texts[this.live.text_of[position]] ?? "";
  }

  // The class that marks a rank that holds others up, or that waits for one.
  markOf(position) {
    const rank = this.rank(position);
    if (this.live.odd.includes(rank)) return "mb-odd";
    return this.live.waiting.includes(rank) ? "mb-waits" : "";
  }

  ranksOf({ from, to }) {
    return Array.from({ length: to - from }, (_, i) => this.rank(from + i));
  }

  describe(tile, counts = this.countStates(tile)) {
    if (tile.to - tile.from > 1) return `${nameRanks(this.ranksOf(tile))}: ${countsText(counts)}`;
    return [`rank ${this.rank(tile.from)}`, this.stateOf(tile.from), this.whereOf(tile.from)].filter(Boolean).join(", ");
  }

  get isRegular() {
    return this.layout.sizes.reduce((product, size) => product * size, 1) === this.count;
  }

  // The coordinates that all ranks of a tile share, along so many axes at most.
  pointOf({ from, to }, most = this.layout.axes.length) {
    const { axes, sizes } = this.layout;
    let block = this.count;
    const parts = [];
    for (let axis = 0; this.isRegular && axis < most; axis++) {
      block /= sizes[axis];
      const low = Math.floor(from / block);
      if (low !== Math.floor((to - 1) / block)) break;
      parts.push(`${axes[axis]}=${low % sizes[axis]}`);
    }
    return parts.join(" ");
  }

  // All that is known of a tile's ranks, as rows of a term and a text.
  detailOf(tile) {
    const [state, ...rows] = tile.to - tile.from === 1 ? this.#rankDetail(tile.from) : this.#blockDetail(tile);
    return [state, ["point", this.pointOf(tile)], ...rows].filter(([, text]) => text);
  }

  #rankDetail(i) {
    const { live, layout } = this;
    const filled = live.gpu_used_mb[i] ? `${memory(live.gpu_used_mb[i])} of ${memory(layout.gpu_total_mb[i])}, ${memory(live.gpu_own_mb[i])} by torch` : "";
    return [
      ["state", this.stateOf(i) + (live.waits[i] >= 0 ? `, waits ${live.waits[i]} % of its time` : "")],
      [live.states[i] === "D" ? "cause" : "at", this.whereOf(i)],
      ["step", live.steps[i]],
      ["host", layout.hosts[layout.host_of[i]]],
      ["device", layout.devices[layout.device_of[i]]],
      ["pid", layout.pids[i] ? String(layout.pids[i]) : ""],
      ["memory", live.memory_mb[i] ? memory(live.memory_mb[i]) : ""],
      ["last error", live.kept_mb?.[i] ? `holds ${memory(live.kept_mb[i])}: %mesh free` : ""],
      ["GPU", live.gpu_percent[i] >= 0 ? `${live.gpu_percent[i]} % busy` : ""],
      ["filled", filled],
      ["traffic", live.moved_kb_s[i] ? rate(live.moved_kb_s[i]) : ""],
    ];
  }

  #blockDetail(tile) {
    const { live, layout } = this;
    const sizes = live.memory_mb.slice(tile.from, tile.to);
    const hosts = [...new Set(layout.host_of.slice(tile.from, tile.to))].map((index) => layout.hosts[index]);
    const busiest = this.placesOf(tile).slice(0, 2);
    return [
      ["state", countsText(this.countStates(tile))],
      [hosts.length > 1 ? "hosts" : "host", hosts.length > 3 ? `${hosts.slice(0, 2).join(", ")} and ${hosts.length - 2} more` : hosts.join(", ")],
      ["memory", `${memory(sum(sizes))}, largest ${memory(Math.max(...sizes))}`],
      ["at", busiest.map(({ text, ranks }) => `${ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks.length} ranks`} ${text}`).join("; ")],
    ];
  }

  // The places where the ranks of a tile are, equal ones once, those of most ranks first. without: ranks in this state.
  placesOf({ from, to }, without = "") {
    const places = this.live.texts.map((text) => ({ text, ranks: [] }));
    for (let i = from; i < to; i++) if (this.live.states[i] !== without) places[this.live.text_of[i]].ranks.push(this.rank(i));
    return places.filter(({ text, ranks }) => text && ranks.length).sort((a, b) => b.ranks.length - a.ranks.length);
  }
}

const countsText = (counts) => ORDER.filter((letter) => counts[letter]).map((letter) => `${counts[letter]} ${STATES[letter][0]}`).join(", ");
