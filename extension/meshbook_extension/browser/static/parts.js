// Words, elements and small parts that the widget, the notice of a hang and the panel share.
// Texts come from ranks and are untrusted: they become text nodes and attributes, never HTML.

export const make = (tag, name, ...children) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
};
export const makeButton = (name, text, onclick, title = "") => {
  const button = make("button", name, text);
  Object.assign(button, { type: "button", onclick, title });
  return button;
};
export const setAll = (element, attributes) => {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
};
export const makeSvg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(element, attributes);
  element.append(...children);
  return element;
};
// Give an element as many children as are needed, and return them.
export const fit = (element, count, build) => {
  while (element.children.length > count) element.lastChild.remove();
  while (element.children.length < count) element.append(build());
  return [...element.children];
};
export const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
export const sum = (values) => values.reduce((total, value) => total + value, 0);

export const seconds = (value) => {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 100) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};
export const age = (value) => {
  const [size, unit] = [[1, "s"], [60, "min"], [3600, "h"], [86400, "d"]].findLast(([size]) => value >= size) ?? [1, "s"];
  return `${Math.floor(value / size)} ${unit}`;
};
export const memory = (mb) => {
  if (mb < 1000) return `${mb} MB`;
  const gb = mb / 1000;
  return gb < 1000 ? `${gb.toPrecision(3)} GB` : `${(gb / 1000).toPrecision(3)} TB`;
};
export const rate = (kb) => (kb < 1000 ? `${kb} kB/s` : `${memory(kb < 1e6 ? Number((kb / 1000).toPrecision(3)) : Math.round(kb / 1000))}/s`);

export const nameRanks = (ranks, most = 12) => {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const shown = runs.slice(0, most).map(([low, high]) => (low === high ? `${low}` : high === low + 1 ? `${low},${high}` : `${low}-${high}`));
  return `${ranks.length === 1 ? "rank" : "ranks"} ${shown.join(",")}${runs.length > most ? ",…" : ""}`;
};

// A list of terms, each with its text.
export const makeTerms = (rows) => make("dl", "", ...rows.map(([term, text]) => make("div", "", make("dt", "", term), make("dd", "", text))));

// Fill a table, but for columns that are empty in all rows.
const fillTable = (element, [heads, ...rows]) => {
  const kept = heads.map((_head, i) => i).filter((i) => rows.some((row) => row[i]));
  const line = (tag, row) => make("tr", "", ...kept.map((i) => Object.assign(make(tag, "", row[i]), { title: row[i] })));
  element.replaceChildren(make("thead", "", line("th", heads)), make("tbody", "", ...rows.map((row) => line("td", row))));
};

// What a button brought: a text, a table, or both; it can be copied and closed.
export class Answer {
  constructor(onClose = () => {}) {
    this.title = make("b");
    this.text = make("pre");
    this.text.tabIndex = 0;
    this.table = make("table", "mb-list");
    this.copyButton = makeButton("mb-plain", "Copy", () => this.#copy());
    const close = makeButton("mb-plain", "Close", () => {
      this.show(null);
      onClose();
    });
    const header = make("header", "", this.title, this.copyButton, close);
    this.element = make("section", "mb-answer", header, this.text, make("div", "mb-scroll", this.table));
    this.element.setAttribute("aria-live", "polite");
    this.show(null);
  }

  show(content) {
    const rows = content?.table ?? [];
    const text = String(content?.text ?? "");
    this.element.hidden = !content;
    setText(this.title, String(content?.title ?? ""));
    setText(this.text, text);
    this.text.hidden = !text;
    this.table.parentElement.hidden = rows.length < 2;
    if (rows.length > 1) fillTable(this.table, rows);
    this.copied = String(content?.copied || text || rows.map((row) => row.join("\t")).join("\n"));
    setText(this.copyButton, "Copy");
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(this.copied);
      setText(this.copyButton, "Copied");
    } catch {
      getSelection().selectAllChildren(this.text.hidden ? this.table : this.text); // a page without the right to copy: by the person's own keys
    }
  }
}
