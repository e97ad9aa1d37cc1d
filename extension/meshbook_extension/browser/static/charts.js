// Charts of the last two minutes, and of the ranks at this moment.
import { make, makeSvg, setText } from "./parts.js";

const WIDTH = 119; // ticks from the left edge to the right one
const HEIGHT = 64;

const frame = (...shapes) => {
  const svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...shapes);
  const [left, right] = [make("span"), make("span")];
  const limits = make("div", "mb-limits", make("span"), make("span", "", "0"));
  const element = make("div", "mb-chart", make("div", "mb-chart-text", left, right), make("div", "mb-plot", svg, limits));
  return { element, svg, left, right, limits, hovered: null };
};

// Show in place of the right text what stands below the pointer.
const onHover = (chart, describe) => {
  chart.svg.addEventListener("pointermove", (event) => {
    chart.hovered = event.offsetX / Math.max(1, chart.svg.clientWidth);
    setText(chart.right, describe(chart.hovered));
  });
  chart.svg.addEventListener("pointerleave", () => {
    chart.hovered = null;
    setText(chart.right, chart.rest);
  });
};

// A line at the median of the ranks, in a band from the least to the largest. top: of the scale; else as the values are.
export function makeChart(top = 0) {
  const [area, band, line] = ["area", "band", "line"].map((name) => makeSvg("path", { class: name }));
  const chart = frame(area, band, line);
  let points = [];
  let format = String;
  const spread = ([least, middle, largest]) => (least === largest ? format(middle) : `${format(middle)}, of ranks ${format(least)} to ${format(largest)}`);
  const describe = (share) => {
    const back = Math.round((1 - share) * WIDTH);
    const point = points[points.length - 1 - back];
    return point ? `${back} s ago: ${spread(point)}` : chart.rest;
  };
  onHover(chart, describe);
  chart.show = (shown, left, right, formatted) => {
    chart.element.hidden = !shown.length;
    if (!shown.length) return;
    [points, format, chart.rest] = [shown, formatted, right];
    setText(chart.left, left);
    setText(chart.right, chart.hovered === null ? right : describe(chart.hovered));
    const [least, middle, largest] = shown[shown.length - 1].map(format);
    chart.svg.setAttribute("aria-label", `${left}: ${least} to ${largest}, median ${middle}`);
    const drawn = shown.length > 1 ? shown : [shown[0], shown[0]];
    const most = top || Math.max(1, ...drawn.map((point) => point[2])) * 1.15;
    setText(chart.limits.firstChild, format(Math.round(most)));
    const at = (which) => drawn.map((point, i) => `${WIDTH + 1 - drawn.length + i},${(HEIGHT - 1 - ((HEIGHT - 4) * point[which]) / most).toFixed(1)}`); // the newest stands at the right
    const low = at(0);
    line.setAttribute("d", `M${at(1).join("L")}`);
    band.setAttribute("d", `M${at(2).join("L")}L${low.reverse().join("L")}Z`);
    area.setAttribute("d", `M${at(1).join("L")}L${WIDTH},${HEIGHT}L${WIDTH + 1 - drawn.length},${HEIGHT}Z`);
  };
  return chart;
}

// A column per rank: its own work below, its waiting for others above.
export function makeShares() {
  const group = makeSvg("g");
  const chart = frame(group);
  let waits = [];
  let nameOf = String;
  const describe = (share) => {
    const i = Math.min(waits.length - 1, Math.floor(share * waits.length));
    return waits[i] >= 0 ? `rank ${nameOf(i)} waits ${waits[i]} % of its time` : `rank ${nameOf(i)}: not known`;
  };
  onHover(chart, describe);
  chart.show = (shown, naming) => {
    const known = shown.filter((wait) => wait >= 0);
    chart.element.hidden = !known.length;
    if (!known.length) return;
    [waits, nameOf] = [shown, naming];
    const least = shown.indexOf(Math.min(...known));
    chart.rest = shown.length > 1 ? `rank ${nameOf(least)} waits least, ${shown[least]} %` : "";
    setText(chart.left, "own work and waiting");
    setText(chart.right, chart.hovered === null ? chart.rest : describe(chart.hovered));
    chart.limits.hidden = true; // columns reach from 0 to 100 %
    chart.svg.setAttribute("aria-label", shown.map((wait, i) => `rank ${nameOf(i)} waits ${wait} %`).join(", "));
    while (group.children.length > 2 * shown.length) group.lastChild.remove();
    while (group.children.length < 2 * shown.length) group.append(makeSvg("rect", { class: "own" }), makeSvg("rect", { class: "wait" }));
    const width = (WIDTH + 1) / shown.length;
    shown.forEach((wait, i) => {
      const cut = (HEIGHT * Math.max(0, wait)) / 100;
      const place = { x: i * width + width * 0.1, width: width * 0.8 };
      const set = (rect, attributes) => Object.entries(attributes).forEach(([name, value]) => rect.setAttribute(name, String(value)));
      set(group.children[2 * i], { ...place, y: cut, height: wait < 0 ? 0 : HEIGHT - cut });
      set(group.children[2 * i + 1], { ...place, y: 0, height: cut });
    });
  };
  return chart;
}
