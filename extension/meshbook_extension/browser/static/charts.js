// Charts of the last two minutes, and of the ranks at this moment.
import { fit, make, makeSvg, memory, rate, setAll, setText, sum } from "./parts.js";

const WIDTH = 119; // ticks from the left edge to the right one
const HEIGHT = 64;

const frame = (...shapes) => {
  const svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...shapes);
  const [left, right] = [make("span"), make("span")];
  const limits = make("div", "mb-limits", make("span"), make("span", "", "0"));
  const element = make("div", "mb-chart", make("div", "mb-chart-text", left, right), make("div", "mb-plot", svg, limits));
  return { element, svg, left, right, limits };
};

// Show in place of the right text what stands below the pointer. Returns the function that writes both texts.
const withHover = (chart, describe) => {
  let [hovered, rest] = [null, ""];
  const show = () => setText(chart.right, (hovered === null ? "" : describe(hovered)) || rest);
  const hover = (share) => {
    hovered = share;
    show();
  };
  chart.svg.addEventListener("pointermove", (event) => hover(event.offsetX / Math.max(1, chart.svg.clientWidth)));
  chart.svg.addEventListener("pointerleave", () => hover(null));
  return (left, right) => {
    rest = right;
    setText(chart.left, left);
    show();
  };
};

// A line at the median of the ranks, in a band from the least to the largest. top: of the scale; else as the values are.
function makeChart(format, top = 0) {
  const [area, band, line] = ["area", "band", "line"].map((name) => makeSvg("path", { class: name }));
  const chart = frame(area, band, line);
  let points = [];
  const spread = ([least, middle, largest]) => (least === largest ? format(middle) : `${format(middle)}, of ranks ${format(least)} to ${format(largest)}`);
  const write = withHover(chart, (share) => {
    const back = Math.round((1 - share) * WIDTH);
    const point = points[points.length - 1 - back];
    return point && `${back} s ago: ${spread(point)}`;
  });
  chart.show = (shown, left, right) => {
    chart.element.hidden = !shown.length;
    if (!shown.length) return;
    points = shown;
    write(left, right);
    const [least, middle, largest] = shown[shown.length - 1].map(format);
    chart.svg.setAttribute("aria-label", `${left}: ${least} to ${largest}, median ${middle}`);
    const drawn = shown.length > 1 ? shown : [shown[0], shown[0]];
    const most = top || Math.max(1, ...drawn.map((point) => point[2])) * 1.15;
    setText(chart.limits.firstChild, format(Math.round(most)));
    const first = WIDTH + 1 - drawn.length; // the newest stands at the right
    const at = (which) => drawn.map((point, i) => `${first + i},${(HEIGHT - 1 - ((HEIGHT - 4) * point[which]) / most).toFixed(1)}`);
    line.setAttribute("d", `M${at(1).join("L")}`);
    band.setAttribute("d", `M${at(2).join("L")}L${at(0).reverse().join("L")}Z`);
    area.setAttribute("d", `M${at(1).join("L")}L${WIDTH},${HEIGHT}L${first},${HEIGHT}Z`);
  };
  return chart;
}

// A column per rank: its own work below, its waiting for others above.
function makeShares() {
  const group = makeSvg("g");
  const chart = frame(group);
  chart.limits.hidden = true; // columns reach from 0 to 100 %
  let waits = [];
  let rankOf = String;
  const describe = (i) => (waits[i] >= 0 ? `rank ${rankOf(i)} waits ${waits[i]} % of its time` : `rank ${rankOf(i)}: not known`);
  const write = withHover(chart, (share) => describe(Math.min(waits.length - 1, Math.floor(share * waits.length))));
  chart.show = (shown, rank) => {
    const known = shown.filter((wait) => wait >= 0);
    chart.element.hidden = !known.length;
    if (!known.length) return;
    [waits, rankOf] = [shown, rank];
    const least = shown.indexOf(Math.min(...known));
    write("own work and waiting", shown.length > 1 ? `rank ${rank(least)} waits least, ${shown[least]} %` : "");
    chart.svg.setAttribute("aria-label", shown.map((_wait, i) => describe(i)).join(", "));
    const rects = fit(group, 2 * shown.length, () => makeSvg("rect"));
    const width = (WIDTH + 1) / shown.length;
    shown.forEach((wait, i) => {
      const cut = (HEIGHT * Math.max(0, wait)) / 100;
      const place = { x: i * width + width * 0.1, width: width * 0.8 };
      setAll(rects[2 * i], { class: "own", ...place, y: cut, height: wait < 0 ? 0 : HEIGHT - cut });
      setAll(rects[2 * i + 1], { class: "wait", ...place, y: 0, height: cut });
    });
  };
  return chart;
}

// The charts of a mesh; those without values are hidden.
export function makeCharts() {
  const [size, traffic, gpu, shares] = [makeChart(memory), makeChart(rate), makeChart((value) => `${value} %`, 100), makeShares()];
  const element = make("div", "mb-charts", ...[size, traffic, gpu, shares].map((chart) => chart.element));
  const show = ({ live, layout, rank }) => {
    const { history, memory_mb: sizes, gpu_used_mb: used } = live;
    const largest = Math.max(...sizes);
    const most = sizes.length > 1 ? `most ${memory(largest)}, rank ${rank(sizes.indexOf(largest))}` : "";
    size.show(history.memory_mb, `memory ${memory(sum(sizes))}`, most);
    const moved = history.moved_kb_s;
    const peak = Math.max(0, ...moved.map((point) => point[2]));
    traffic.show(peak ? moved : [], `traffic ${rate(moved.at(-1)?.[1] ?? 0)}`, `peak ${rate(peak)}${sizes.length > 1 ? " a rank" : ""}`);
    const full = used.length ? `${memory(sum(used))} of ${memory(sum(layout.gpu_total_mb))} used` : "";
    gpu.show(history.gpu_percent, `GPU ${history.gpu_percent.at(-1)?.[1]} %`, full);
    shares.show(sizes.length <= 64 ? live.waits : [], rank);
  };
  return { element, show };
}
