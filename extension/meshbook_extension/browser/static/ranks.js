// The ranks of a mesh: a row for each of a few, a tile for each of many, a tile for a block of them above that.
import { make, makeButton, makeSvg, makeTerms, memory, plural, seconds, setAll, setText, sum } from "./parts.js";
import { ORDER, STATES } from "./mesh.js";

const CALM = ["C", "B", "I"]; // states of a mesh that works; any other one of a single rank is shown for its whole tile
export const ROWS = 8; // up to here each rank has a row
const LARGE = 64; // up to here each tile has its number
const SINGLE = 256; // up to here each rank has a tile
const BLOCKS = 512; // at most so many tiles for more ranks than that

export const makeIcon = (letter) => makeSvg("svg", { class: "mb-icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, makeSvg("path", { d: STATES[letter][1] }));
const setIcon = (icon, letter) => icon.firstChild.setAttribute("d", STATES[letter][1]);

// Move the focus by an arrow key; returns the button that has it then. steps: how many buttons further, by key.
function moveFocus(event, buttons, steps) {
  const index = buttons.indexOf(event.target);
  const step = steps[event.key];
  if (index < 0 || !step) return null;
  event.preventDefault();
  event.stopPropagation(); // the notebook would move to another cell
  const next = buttons[Math.max(0, Math.min(buttons.length - 1, index + step))];
  next.focus();
  return next;
}

const makeBar = () => {
  const fill = make("i");
  const text = make("span");
  return { element: make("span", "mb-bar", make("span", "mb-bar-track", fill), text), fill, text };
};
const setBar = (bar, share, text) => {
  bar.element.hidden = !text;
  bar.fill.style.width = `${Math.max(0, Math.min(100, 100 * share)).toFixed(1)}%`;
  setText(bar.text, text);
};

// A row for each rank, with its detail unfolded below the chosen one. choose(tile): a row was clicked.
export class Rows {
  constructor(choose) {
    this.choose = choose;
    this.body = make("tbody");
    this.heads = make("tr", "", ...["rank", "state", "where", "step", "memory", "GPU", "waits"].map((text) => make("th", `mb-of-${text.toLowerCase()}`, text)));
    this.element = make("table", "mb-rows-table", make("thead", "", this.heads), this.body);
    this.body.addEventListener("keydown", (event) => moveFocus(event, this.rows.map((row) => row.button), { ArrowDown: 1, ArrowUp: -1 }));
  }

  build(mesh) {
    this.rows = mesh.layout.pids.map((_pid, i) => {
      const tile = { from: i, to: i + 1 };
      const icon = makeIcon("I");
      const button = makeButton("mb-rank", "", () => this.choose(tile));
      button.append(icon, make("b", "", String(mesh.rank(i))));
      const cells = Object.fromEntries(["state", "where", "step"].map((name) => [name, make("td", `mb-of-${name}`)]));
      const bars = Object.fromEntries(["memory", "gpu", "waits"].map((name) => [name, makeBar()]));
      const barCells = Object.entries(bars).map(([name, bar]) => make("td", `mb-of-${name}`, bar.element));
      const line = make("tr", "", make("td", "mb-of-rank", button), ...Object.values(cells), ...barCells);
      line.addEventListener("click", (event) => event.target.closest("button") || this.choose(tile));
      const more = make("tr", "mb-more", make("td"));
      more.firstChild.colSpan = 7;
      return { ...tile, button, icon, cells, bars, line, more };
    });
    this.body.replaceChildren(...this.rows.flatMap((row) => [row.line, row.more]));
  }

  update(mesh, chosen) {
    const { live, layout } = mesh;
    const largest = Math.max(1, ...live.memory_mb) * 1.15;
    const used = { step: live.steps.length > 0, gpu: live.gpu_percent.length > 0, waits: live.waits.some((wait) => wait >= 0), where: live.texts.some(Boolean) };
    for (const [name, shown] of Object.entries(used)) this.element.classList.toggle(`mb-no-${name}`, !shown);
    this.element.classList.toggle("mb-still", !Object.values(used).some(Boolean));
    this.rows.forEach((row, i) => {
      const letter = live.states[i];
      const busy = live.busy_ds[i] / 10;
      if (row.letter !== letter) setIcon(row.icon, (row.letter = letter));
      row.line.className = `mb-line mb-is-${letter} ${mesh.markOf(i)}`;
      row.button.setAttribute("aria-label", mesh.describe(row));
      row.button.setAttribute("aria-expanded", String(chosen?.from === i));
      setText(row.cells.state, mesh.stateOf(i) + (busy > 0 && letter !== "I" ? ` ${seconds(busy)}` : ""));
      setText(row.cells.where, mesh.whereOf(i));
      row.cells.where.title = mesh.whereOf(i);
      setText(row.cells.step, live.steps[i] ?? "");
      setBar(row.bars.memory, live.memory_mb[i] / largest, live.memory_mb[i] ? memory(live.memory_mb[i]) : "");
      setBar(row.bars.gpu, live.gpu_percent[i] / 100, live.gpu_percent[i] >= 0 ? `${live.gpu_percent[i]} %` : "");
      row.bars.gpu.element.title = live.gpu_used_mb[i] ? `${memory(live.gpu_used_mb[i])} of ${memory(layout.gpu_total_mb[i])} filled` : "";
      setBar(row.bars.waits, live.waits[i] / 100, live.waits[i] >= 0 ? `${live.waits[i]} %` : "");
      row.more.hidden = chosen?.from !== i;
      if (!row.more.hidden) row.more.firstChild.replaceChildren(makeTerms(mesh.detailOf(row)));
    });
  }
}

// A tile stands for the ranks `from` up to `to` (positions in the columns), a row for tiles with equal leading axes.
export function arrange(mesh) {
  const { axes, sizes } = mesh.layout;
  const { count } = mesh;
  const single = count <= SINGLE;
  let kept = axes.length;
  let tiles = count;
  if (!single) {
    kept = 0;
    tiles = 1;
    while (kept < sizes.length && tiles * sizes[kept] <= BLOCKS) tiles *= sizes[kept++];
    while (kept > 1 && tiles * 2 > count) tiles /= sizes[--kept]; // blocks of one rank are no blocks
  }
  if (!mesh.isRegular || (!single && tiles <= 16)) {
    const block = single ? 1 : Math.ceil(count / SINGLE);
    return { block, caption: block > 1 ? `one square per ${plural(block, "rank")}` : "", rows: [rowOf("", 0, Math.ceil(count / block), block, count)] };
  }
  const block = count / tiles;
  const leading = kept > 1 && tiles > sizes[kept - 1] ? kept - 1 : 0;
  const length = leading ? sizes[leading] : tiles;
  const rows = [];
  for (let first = 0; first < tiles; first += length) {
    const label = leading ? mesh.pointOf({ from: first * block, to: (first + length) * block }, leading) : "";
    rows.push(rowOf(label, first, length, block, count));
  }
  const across = leading ? `${axes[leading]} from left to right` : "";
  const square = `one square per index of ${axes.slice(0, kept).join(" and ")}, ${plural(block, "rank")} each`;
  return { block, rows, caption: block > 1 ? [square, across].filter(Boolean).join("; ") : across };
}

export function rowOf(label, first, length, block, count) {
  const tiles = [];
  for (let i = first; i < first + length; i++) tiles.push({ from: i * block, to: Math.min(count, (i + 1) * block) });
  return { label, tiles };
}

// A tile of many ranks: its states side by side, as wide as they are frequent.
function mixture(counts) {
  const total = sum(Object.values(counts));
  const stops = [];
  let at = 0;
  for (const letter of ORDER) {
    if (!counts[letter]) continue;
    const share = Math.max(8, (100 * counts[letter]) / total);
    stops.push(`var(--${letter}) ${at}% ${Math.min(100, at + share)}%`);
    at += share;
  }
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

export class Tiles {
  constructor(onShow, onChoose) {
    this.element = make("div", "mb-rows");
    this.tiles = [];
    const on = (names, act) => names.forEach((name) => this.element.addEventListener(name, act));
    const ifTile = (act) => (event) => {
      const button = event.target.closest(".mb-tile");
      if (button) act(this.tiles[Number(button.dataset.index)]);
    };
    on(["pointerover", "focusin"], ifTile(onShow));
    on(["pointerleave", "focusout"], () => onShow(null));
    on(["click"], ifTile(onChoose));
    on(["keydown"], (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns };
      const next = moveFocus(event, this.tiles.map((tile) => tile.button), steps);
      if (next) [event.target.tabIndex, next.tabIndex] = [-1, 0];
    });
  }

  build(mesh, arranged) {
    const count = sum(arranged.rows.map((row) => row.tiles.length));
    this.large = arranged.block === 1 && count <= LARGE;
    this.tiles = [];
    this.longest = Math.max(1, ...arranged.rows.map((row) => row.tiles.length));
    const longestLabel = Math.max(...arranged.rows.map((row) => row.label.length));
    this.labelWidth = longestLabel ? 12 + Math.ceil(6.8 * longestLabel) : 0;
    this.grids = arranged.rows.map((row) => make("div", "mb-tiles", ...row.tiles.map((tile) => this.#makeTile(mesh, tile))));
    this.element.replaceChildren(
      ...arranged.rows.map((row, i) => {
        const element = make("div", "mb-row", ...(row.label ? [make("div", "mb-row-label", row.label)] : []), this.grids[i]);
        if (row.label) setAll(element, { role: "group", "aria-label": row.label });
        return element;
      }),
    );
    this.element.classList.toggle("mb-small", !this.large);
    const [widest, narrowest, height, gap] = this.large ? [58, 32, 40, 5] : [24, 20, 22, 3];
    Object.assign(this, { widest, narrowest, gap });
    for (const [name, value] of Object.entries({ "tile-h": height, gap, "label-w": this.labelWidth })) this.element.style.setProperty(`--${name}`, `${value}px`);
    this.fit(this.width || 600);
  }

  #makeTile(mesh, tile) {
    tile.button = makeButton("mb-tile", "", null);
    tile.button.tabIndex = this.tiles.length ? -1 : 0;
    tile.button.dataset.index = this.tiles.length;
    tile.icon = makeIcon("I");
    if (this.large) {
      [tile.memory, tile.busy] = [make("i", "mb-memory"), make("i", "mb-busy")];
      tile.button.append(make("b", "", String(mesh.rank(tile.from))), tile.icon, make("span", "mb-meters", tile.memory, tile.busy));
    } else tile.button.append(tile.icon);
    this.tiles.push(tile);
    return tile.button;
  }

  // Rows break at a multiple of 8 where they can, so that ranks stand below each other.
  fit(width) {
    this.width = width;
    const free = width - this.labelWidth + (this.gap ?? 0);
    const fitting = Math.floor(free / Math.min(this.longest, 8)) - this.gap; // 8 side by side, narrower if need be
    const tile = Math.max(this.narrowest, Math.min(this.widest, fitting));
    const room = Math.max(1, Math.floor(free / (tile + this.gap)));
    this.element.style.setProperty("--tile-w", `${tile}px`);
    this.columns = room >= this.longest ? this.longest : room >= 16 ? room - (room % 8) : room >= 4 ? room - (room % 4) : room;
    for (const grid of this.grids || []) grid.style.setProperty("--cols", this.columns);
  }

  update(mesh, chosen) {
    const { memory_mb: sizes, waits } = mesh.live;
    const largest = Math.max(1, ...sizes) * 1.15;
    for (const tile of this.tiles) {
      const counts = mesh.countStates(tile);
      const letter = ORDER.find((each) => counts[each]) || "I";
      const mixed = CALM.includes(letter) && Object.keys(counts).length > 1;
      const look = mixed ? mixture(counts) : "";
      const mark = tile.to - tile.from === 1 ? mesh.markOf(tile.from) : "";
      const key = `${letter}${look}${mark}`;
      if (tile.key !== key) {
        tile.key = key;
        tile.button.className = `mb-tile mb-${letter} ${mark}`;
        tile.button.style.background = look;
        setIcon(tile.icon, letter);
      }
      if (this.large) {
        const wait = waits[tile.from] ?? -1;
        tile.memory.style.width = `${(100 * sizes[tile.from]) / largest}%`;
        tile.busy.style.width = `${wait < 0 ? (CALM.slice(0, 2).includes(letter) ? 100 : 0) : 100 - wait}%`;
      }
      const label = mesh.describe(tile, counts);
      if (tile.label !== label) tile.button.setAttribute("aria-label", (tile.label = label));
      const pressed = chosen !== null && chosen.from === tile.from && chosen.to === tile.to;
      if (tile.pressed !== pressed) tile.button.setAttribute("aria-pressed", String((tile.pressed = pressed)));
    }
  }
}
