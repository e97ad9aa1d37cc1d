// The health of a mesh in the browser: one sentence, the ranks, charts, failures, and buttons that help now.
// Two synced traits come in: `layout_of` (axes, hosts, pids; rarely) and `live` (each second). Messages go out: {kind:
// "look"} while this view can be seen, {kind: "act"} for a button, {kind: "dismiss"} for a failure.
import { Answer, age, make, makeButton, memory, nameRanks, plural, rate, setText, sum } from "./parts.js";
import { makeChart, makeShares } from "./charts.js";
import { ORDER, ROWS, Rows, STATES, Tiles, arrange, countStates, makeIcon, rowOf } from "./ranks.js";

const ACTIONS = { heal: "Heal", stacks: "Stacks", pdb: "pdb", interrupt: "Interrupt" };
const SECTIONS = { jobs: "Jobs", variables: "Variables", logs: "Logs" };
const WORKING = ["B", "C", "X", "P", "T", "U"];
const GONE_S = 15; // without news for so long, the view shows the past
const LOOK_AGAIN_MS = 10_000;
const PLACES = 5; // so many of the places where ranks are
const FIRST_STEPS = [
  ["%load_ext meshbook", "gives a notebook the magics"],
  ["%mesh spawn gpus=4", "starts four ranks here"],
  ["%mesh attach", "goes back to a mesh that waits"],
  ["%mesh help", "names all that there is"],
];
const remembered = new WeakMap(); // model -> what was chosen, for a view that is made again

export class HealthView {
  // isPanel: sections with jobs, variables and logs stand below, and charts are always there
  constructor(model, el, isPanel = false) {
    this.model = model;
    this.isPanel = isPanel;
    this.id = crypto.randomUUID?.() ?? String(Math.random());
    this.memory = remembered.get(model) ?? { chosen: null, member: null, answer: null, charts: isPanel };
    remembered.set(model, this.memory);
    this.stopping = new AbortController();
    this.#build(el);
    this.#listen(el);
    this.onLayout();
    this.answer.show(this.memory.answer);
    if (!this.live) this.onLive();
  }

  #build(el) {
    this.say = make("span", "mb-say");
    this.meta = make("span", "mb-meta");
    this.tabs = make("div", "mb-tabs");
    this.buttons = make("div", "mb-buttons");
    this.cells = make("div", "mb-cells");
    this.caption = make("div", "mb-caption");
    this.rows = new Rows((tile) => this.choose(tile), (i) => this.rankDetail(i));
    this.tiles = new Tiles((tile) => this.show(tile), (tile) => this.choose(tile));
    this.memberTitle = make("div", "mb-caption");
    this.members = new Tiles((tile) => this.show(tile), (tile) => this.chooseMember(tile));
    this.memberBox = make("div", "mb-members", this.memberTitle, this.members.element);
    this.places = make("ul", "mb-places");
    this.charts = { memory_mb: makeChart(), moved_kb_s: makeChart(), gpu_percent: makeChart(100), waits: makeShares() };
    this.chartBox = make("div", "mb-charts", ...Object.values(this.charts).map((chart) => chart.element));
    this.curves = make("div", "mb-curves");
    this.errors = make("ul", "mb-errors");
    this.answer = new Answer(() => (this.memory.answer = null));
    this.note = make("div", "mb-note");
    this.sections = make("div", "mb-sections");
    this.detail = make("div", "mb-detail");
    this.detail.popover = "manual";
    this.detail.hidden = !this.detail.showPopover; // an old browser: labels of tiles tell the same
    this.empty = make("div", "mb-empty");
    this.#buildSections();
    const head = make("div", "mb-head", this.say, this.meta, make("div", "mb-tools", this.buttons, this.tabs));
    this.ranks = make("div", "mb-ranks", this.caption, this.rows.element, this.tiles.element, this.memberBox, this.places);
    this.body = make("div", "mb-body", this.cells, this.ranks, this.chartBox, this.curves, this.errors, this.answer.element, this.note, this.sections);
    this.root = make("div", `meshbook${isDock(this.isPanel)}`, make("div", "mb-card", head, this.empty, this.body), this.detail);
    el.append(this.root);
  }

  #buildSections() {
    this.open = {};
    if (!this.isPanel) {
      const toggle = makeButton("mb-plain", "Charts", () => {
        this.memory.charts = !this.memory.charts;
        this.showCharts();
      });
      const others = Object.entries(SECTIONS).map(([action, title]) => makeButton("mb-plain", title, () => this.act(action)));
      this.tabs.append(toggle, ...others);
      return;
    }
    for (const [action, title] of Object.entries(SECTIONS)) {
      const content = new Answer();
      content.element.querySelector("header").hidden = true;
      const section = make("details", "", make("summary", "", title), content.element);
      section.dataset.action = action;
      section.addEventListener("toggle", () => section.open && this.act(action));
      this.sections.append(section);
      this.open[action] = { section, content };
    }
  }

  #listen(el) {
    const { signal } = this.stopping;
    for (const [event, method] of [["change:live", "onLive"], ["change:layout_of", "onLayout"], ["msg:custom", "onMessage"]]) {
      this[method] = this[method].bind(this);
      this.model.on(event, this[method]);
      signal.addEventListener("abort", () => this.model.off(event, this[method]));
    }
    this.visible = false;
    this.watcher = new IntersectionObserver((entries) => {
      this.inSight = entries[entries.length - 1].isIntersecting;
      this.look();
    });
    this.watcher.observe(el);
    document.addEventListener("visibilitychange", () => this.look(), { signal });
    this.sizer = new ResizeObserver(() => {
      for (const tiles of [this.tiles, this.members]) tiles.fit(this.ranks.clientWidth);
    });
    this.sizer.observe(this.ranks);
    this.clocks = [setInterval(() => this.visible && this.#sayLook(), LOOK_AGAIN_MS), setInterval(() => this.onSecond(), 1000)];
  }

  close() {
    this.stopping.abort();
    this.watcher.disconnect();
    this.sizer.disconnect();
    this.clocks.forEach(clearInterval);
    this.show(null);
    this.inSight = false;
    this.look();
  }

  #send(content) {
    try {
      this.model.send(content);
    } catch {
      // the kernel is gone; the sentence says so
    }
  }

  #sayLook() {
    this.#send({ kind: "look", view: this.id, visible: this.visible });
  }

  look() {
    const visible = Boolean(this.inSight) && document.visibilityState === "visible";
    if (visible === this.visible) return;
    this.visible = visible;
    this.#sayLook();
    if (visible) this.onLive();
  }

  act(action, ranks = this.chosenRanks()) {
    this.#send({ kind: "act", action, ranks });
  }

  onMessage(message) {
    if (message?.kind !== "answer") return;
    const open = this.open[message.action];
    if (open) {
      open.content.show(message);
      return;
    }
    this.memory.answer = message;
    this.answer.show(message);
  }

  onSecond() {
    this.showState();
    if (this.visible && this.live?.states) this.showErrors();
    this.ticks = (this.ticks ?? 0) + 1;
    if (!this.isPanel || !this.visible || !this.isLive()) return;
    const ended = this.wasWorking && !this.isWorking();
    this.wasWorking = this.isWorking();
    for (const [action, { section }] of Object.entries(this.open)) {
      const due = action === "variables" ? ended : ended || (this.wasWorking && this.ticks % 3 === 0);
      if (section.open && due) this.act(action); // variables would hold ranks up that work
    }
  }

  // ---- drawing

  onLayout() {
    const layout = this.model.get("layout_of");
    if (!layout?.pids) return;
    this.layout = layout;
    this.rank = (position) => layout.ranks[position] ?? position;
    const count = layout.pids.length;
    const arranged = arrange(layout);
    this.hasRows = count <= ROWS;
    this.rows.element.hidden = !this.hasRows;
    this.tiles.element.hidden = this.hasRows;
    this.grid = this.hasRows ? this.rows : this.tiles;
    this.grid.build(this, arranged);
    setText(this.caption, arranged.caption);
    this.caption.hidden = this.hasRows || !arranged.caption;
    if (this.memory.chosen?.to > count) this.memory.chosen = this.memory.member = null;
    this.showMembers();
    this.onLive();
  }

  onLive() {
    const live = this.model.get("live");
    if (!live?.phase) return;
    this.arrived = Date.now();
    const fits = live.states && this.layout && live.states.length === this.layout.pids.length;
    if (!fits) {
      this.showEmpty(live.phase === "none" ? live : null);
      return;
    }
    this.live = live;
    this.showEmpty(null);
    this.showState();
    if (!this.visible && this.drawn) return;
    this.drawn = true;
    this.memory.charts ||= this.isWorking();
    this.showCells();
    this.grid.update(this, this.memory.chosen);
    if (!this.memberBox.hidden) this.members.update(this, this.memory.member);
    this.showPlaces();
    this.showDetail();
    this.showCharts();
    this.showErrors();
    this.showCurves(live.curves ?? "");
    setText(this.note, live.note);
    this.note.hidden = !live.note;
  }

  showEmpty(live) {
    this.body.hidden = Boolean(live);
    this.empty.hidden = !live;
    if (!live) return;
    this.live = live;
    this.showState();
    const needed = live.tick_s ? FIRST_STEPS.slice(1) : FIRST_STEPS; // a kernel that speaks has our extension
    if (this.empty.firstChild?.children.length === needed.length) return;
    const steps = needed.map(([code, text]) => make("li", "", make("code", "", code), make("span", "", text)));
    this.empty.replaceChildren(make("ul", "", ...steps));
  }

  isLive() {
    return Boolean(this.live?.states) && this.live.phase !== "ended" && !this.isGone;
  }

  isWorking() {
    return this.isLive() && (this.live.cells.length > 0 || WORKING.some((letter) => this.live.states.includes(letter)));
  }

  // The sentence, what the mesh is, and the buttons that help now.
  showState() {
    const { live } = this;
    if (!live) return;
    const silent = (Date.now() - this.arrived) / 1000;
    const late = ["live", "none"].includes(live.phase) && this.visible && silent > 4 * live.tick_s; // never without ticks
    const why = this.model.get("gone");
    this.isGone = Boolean(why) || (late && silent > GONE_S);
    let { level, text } = live.say ?? { level: "calm", text: "no mesh in this notebook" };
    if (live.phase === "ended") [level, text] = ["gone", "the mesh has ended"];
    if (late) [level, text] = ["warning", `no news for ${age(silent)}`];
    if (this.isGone) [level, text] = ["gone", why || `${text}: has the kernel restarted? Run %mesh again`];
    if (level === "calm" && live.states) text = `${plural(live.states.length, "rank")} ${text}`;
    this.root.dataset.level = level;
    this.root.dataset.phase = this.isGone ? "gone" : live.phase;
    setText(this.say, text);
    this.say.title = text;
    this.showMeta();
    this.showButtons();
  }

  showMeta() {
    const { layout, live } = this;
    this.meta.hidden = !live.states;
    if (!live.states) return;
    const axes = layout.axes.map((axis, i) => `${axis}=${layout.sizes[i]}`).join(" ");
    const parts = [layout.name, axes, layout.device, `${plural(layout.pids.length, "rank")} on ${plural(layout.host_count, "host")}`];
    setText(this.meta, [...parts, live.auto ? "auto: every cell runs here" : ""].filter(Boolean).join(" · "));
  }

  showButtons() {
    const counts = this.live.states ? countStates(this.live.states) : {};
    const { helps = [], ranks = [] } = this.live.say ?? {};
    const wanted = ["stacks", ...(this.isWorking() ? ["pdb", "interrupt"] : []), ...(counts.D ? ["heal"] : [])];
    const shown = this.isLive() ? [...helps, ...wanted].filter((action, i, all) => ACTIONS[action] && all.indexOf(action) === i) : [];
    this.tabs.hidden = !this.isLive();
    const chosen = this.chosenRanks();
    const meant = chosen.length ? chosen : ranks.length === 1 ? ranks : [];
    const key = JSON.stringify([shown, helps, meant]);
    if (key === this.buttonsKey) return;
    this.buttonsKey = key;
    this.buttons.replaceChildren(
      ...shown.map((action) => {
        const on = action === "pdb" ? meant : action === "stacks" ? chosen : [];
        const label = ACTIONS[action] + (on.length === 1 ? ` ${on[0]}` : "");
        const button = makeButton("", label, () => this.act(action, on), on.length ? `${ACTIONS[action]}: ${nameRanks(on)}` : ACTIONS[action]);
        button.dataset.action = action;
        button.dataset.urgent = String(action === helps[0]);
        return button;
      }),
    );
  }

  showCells() {
    const cells = this.live.cells;
    while (this.cells.children.length > cells.length) this.cells.lastChild.remove();
    while (this.cells.children.length < cells.length) this.cells.append(make("div", "mb-track", make("div", "mb-fill"), make("div", "mb-least")));
    cells.forEach((cell, i) => {
      const track = this.cells.children[i];
      const [fill, least] = track.children;
      const bar = cell.progress;
      const isKnown = Boolean(bar || cell.ended);
      const share = bar ? bar.mean : cell.ended / cell.ranks;
      track.setAttribute("role", "progressbar");
      track.setAttribute("aria-label", cell.what);
      track.title = cell.what;
      track.dataset.unknown = String(!isKnown);
      if (isKnown) track.setAttribute("aria-valuenow", String(Math.round(100 * share)));
      else track.removeAttribute("aria-valuenow");
      fill.style.width = `${isKnown ? 100 * share : 100}%`;
      least.hidden = !bar || bar.mean - bar.least < 0.02;
      if (bar) least.style.left = `${100 * bar.least}%`;
    });
  }

  describe(tile, counts) {
    const { states } = this.live;
    if (tile.to - tile.from > 1) return `${this.nameTile(tile)}: ${countsText(counts)}`;
    const what = this.what(tile.from);
    return `rank ${this.rank(tile.from)}, ${STATES[states[tile.from]][0]}${what ? `, ${what}` : ""}`;
  }

  // The class that marks a rank that holds others up, or that waits for one.
  markOf(position) {
    const rank = this.rank(position);
    if (this.live.odd.includes(rank)) return "mb-odd";
    return this.live.waiting.includes(rank) ? "mb-waits" : "";
  }

  nameTile(tile) {
    return nameRanks(this.positions(tile).map(this.rank));
  }

  positions(tile) {
    return Array.from({ length: tile.to - tile.from }, (_, i) => tile.from + i);
  }

  what(position) {
    return this.live.texts[this.live.text_of[position]] ?? "";
  }

  // Where the ranks of tiles are, equal places once; rows say it themselves.
  showPlaces() {
    const groups = this.live.texts.map((text) => ({ text, ranks: [] }));
    this.live.text_of.forEach((index, i) => this.live.states[i] !== "D" && groups[index].ranks.push(this.rank(i)));
    const running = this.hasRows ? [] : groups.filter((group) => group.text && group.ranks.length).sort((a, b) => b.ranks.length - a.ranks.length);
    const shown = running.slice(0, running.length > PLACES ? PLACES - 1 : PLACES);
    while (this.places.children.length > shown.length) this.places.lastChild.remove();
    while (this.places.children.length < shown.length) this.places.append(make("li", "", make("b"), make("code"), make("span")));
    shown.forEach((group, i) => {
      const [ranks, place, more] = this.places.children[i].children;
      const named = nameRanks(group.ranks, 5);
      setText(ranks, named.endsWith("…") ? plural(group.ranks.length, "rank") : named);
      setText(place, group.text);
      setText(more, i === shown.length - 1 && running.length > shown.length ? `and ${running.length - shown.length} other places` : "");
    });
    this.places.hidden = !shown.length;
  }

  showCharts() {
    const { history, memory_mb: sizes, gpu_used_mb: used, waits } = this.live;
    this.chartBox.hidden = !this.memory.charts;
    if (!this.memory.charts) return;
    const largest = Math.max(...sizes);
    const most = sizes.length > 1 ? `most ${memory(largest)}, rank ${this.rank(sizes.indexOf(largest))}` : "";
    this.charts.memory_mb.show(history.memory_mb, `memory ${memory(sum(sizes))}`, most, memory);
    const moved = history.moved_kb_s;
    const peak = Math.max(0, ...moved.map((point) => point[2]));
    const now = moved.length ? moved[moved.length - 1][1] : 0;
    this.charts.moved_kb_s.show(peak ? moved : [], `traffic ${rate(now)}`, `peak ${rate(peak)}${sizes.length > 1 ? " a rank" : ""}`, rate);
    const percents = history.gpu_percent;
    const full = used.length ? `${memory(sum(used))} of ${memory(sum(this.layout.gpu_total_mb))} used` : "";
    this.charts.gpu_percent.show(percents, percents.length ? `GPU ${percents[percents.length - 1][1]} %` : "", full, (value) => `${value} %`);
    this.charts.waits.show(sizes.length <= 64 ? waits : [], this.rank);
  }

  showCurves(picture) {
    this.curves.hidden = !picture;
    if (picture === this.picture) return;
    this.picture = picture;
    this.curves.innerHTML = picture; // SVG that the kernel has drawn; names in it are escaped there
  }

  // Newest first, with their age; those whose ranks have run well since are grey.
  showErrors() {
    const now = Date.now() / 1000;
    const newest = [...this.live.errors].sort((a, b) => (b.at || now) - (a.at || now));
    const rows = newest.map((error) => ({ ...error, age: error.at ? age(Math.max(0, now - error.at)) : "" }));
    const key = JSON.stringify(rows);
    if (key === this.errorsKey) return;
    this.errorsKey = key;
    this.errors.hidden = !rows.length;
    this.errors.replaceChildren(
      ...rows.map((error) => {
        const ranks = `${/^\d+$/.test(error.ranks) ? "rank" : "ranks"} ${error.ranks}`;
        const dismiss = makeButton("mb-plain mb-dismiss", "×", () => this.#send({ kind: "dismiss", error: error.number }), "Dismiss");
        dismiss.setAttribute("aria-label", `Dismiss: ${ranks}`);
        const side = [error.where || error.what, error.settled ? "ran well since" : "", error.age && `${error.age} ago`];
        const parts = [make("b", "", ranks), make("code", "", error.text), make("span", "", side.filter(Boolean).join(" · "))];
        return make("li", error.settled ? "mb-settled" : "", ...parts, ...(error.number ? [dismiss] : []));
      }),
    );
  }

  // ---- choosing

  show(tile) {
    this.shown = tile;
    this.showDetail();
  }

  choose(tile) {
    const chosen = this.memory.chosen;
    const same = chosen && chosen.from === tile.from && chosen.to === tile.to;
    this.memory.chosen = same ? null : { from: tile.from, to: tile.to };
    this.memory.member = null;
    this.showMembers();
    this.onLive();
  }

  chooseMember(tile) {
    this.memory.member = this.memory.member?.from === tile.from ? null : { from: tile.from, to: tile.to };
    this.onLive();
  }

  chosenRanks() {
    const tile = this.memory.member ?? this.memory.chosen;
    return tile ? this.positions(tile).map(this.rank) : [];
  }

  // The ranks of a chosen square, one by one.
  showMembers() {
    const chosen = this.memory.chosen;
    const size = chosen ? chosen.to - chosen.from : 0;
    this.memberBox.hidden = size < 2;
    if (size < 2) return;
    const row = rowOf("", 0, size, 1, size);
    for (const tile of row.tiles) {
      tile.from += chosen.from;
      tile.to += chosen.from;
    }
    setText(this.memberTitle, [this.pointOf(chosen), this.nameTile(chosen)].filter(Boolean).join(" · "));
    this.members.build(this, { block: 1, rows: [row] });
  }

  // The coordinates that all ranks of a tile share.
  pointOf(tile) {
    const { axes, sizes } = this.layout;
    if (sizes.reduce((product, size) => product * size, 1) !== this.layout.pids.length) return "";
    let block = this.layout.pids.length;
    const parts = [];
    for (let axis = 0; axis < axes.length; axis++) {
      block /= sizes[axis];
      const low = Math.floor(tile.from / block);
      if (low !== Math.floor((tile.to - 1) / block)) break;
      parts.push(`${axes[axis]}=${low % sizes[axis]}`);
    }
    return parts.join(" ");
  }

  // A tile's ranks in a box above the page, so that nothing moves.
  showDetail() {
    const tile = this.shown;
    const isOpen = this.detail.matches(":popover-open");
    if (!tile || this.hasRows || tile.to > this.live?.states?.length || !tile.button.isConnected) {
      if (isOpen) this.detail.hidePopover();
      return;
    }
    const single = tile.to - tile.from === 1;
    const rows = single ? this.rankDetail(tile.from) : this.blockDetail(tile);
    const list = make("dl", "", ...rows.flatMap(([term, text]) => [make("dt", "", term), make("dd", "", text)]));
    const title = single ? `Rank ${this.rank(tile.from)}` : this.nameTile(tile);
    this.detail.replaceChildren(make("h4", "", single ? makeIcon(this.live.states[tile.from]) : "", title), list);
    if (!isOpen) this.detail.showPopover?.();
    const [at, box] = [tile.button.getBoundingClientRect(), this.detail.getBoundingClientRect()];
    const below = at.bottom + 6 + box.height < innerHeight || at.top < box.height + 6;
    this.detail.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.width - 8))}px`;
    this.detail.style.top = `${below ? at.bottom + 6 : at.top - box.height - 6}px`;
  }

  rankDetail(i) {
    const { live, layout } = this;
    const letter = live.states[i];
    const rows = [
      ["state", STATES[letter][0] + (live.waits[i] >= 0 ? `, waits ${live.waits[i]} % of its time` : "")],
      [letter === "D" ? "cause" : "at", this.what(i)],
      ["step", live.steps[i]],
      ["point", this.pointOf({ from: i, to: i + 1 })],
      ["host", layout.hosts[layout.host_of[i]]],
      ["device", layout.devices[layout.device_of[i]]],
      ["pid", layout.pids[i] ? String(layout.pids[i]) : ""],
      ["memory", live.memory_mb[i] ? memory(live.memory_mb[i]) : ""],
      ["last error", live.kept_mb?.[i] ? `holds ${memory(live.kept_mb[i])}: %mesh free` : ""],
      ["GPU", live.gpu_percent[i] >= 0 ? `${live.gpu_percent[i]} % busy` : ""],
      ["filled", live.gpu_used_mb[i] ? `${memory(live.gpu_used_mb[i])} of ${memory(layout.gpu_total_mb[i])}, ${memory(live.gpu_own_mb[i])} by torch` : ""],
      ["traffic", live.moved_kb_s[i] ? rate(live.moved_kb_s[i]) : ""],
    ];
    return rows.filter(([, text]) => text);
  }

  blockDetail(tile) {
    const { live, layout } = this;
    const positions = this.positions(tile);
    const sizes = positions.map((i) => live.memory_mb[i]);
    const hosts = [...new Set(positions.map((i) => layout.hosts[layout.host_of[i]]))];
    const places = {};
    for (const i of positions) if (this.what(i)) (places[this.what(i)] ??= []).push(this.rank(i));
    const busiest = Object.entries(places).sort((a, b) => b[1].length - a[1].length).slice(0, 2);
    const rows = [
      ["state", countsText(countStates(live.states, tile.from, tile.to))],
      ["point", this.pointOf(tile)],
      [hosts.length > 1 ? "hosts" : "host", hosts.length > 3 ? `${hosts.slice(0, 2).join(", ")} and ${hosts.length - 2} more` : hosts.join(", ")],
      ["memory", `${memory(sum(sizes))}, largest ${memory(Math.max(...sizes))}`],
      ["at", busiest.map(([place, ranks]) => `${ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks.length} ranks`} ${place}`).join("; ")],
    ];
    return rows.filter(([, text]) => text);
  }
}

const isDock = (isPanel) => (isPanel ? " mb-dock" : "");
const countsText = (counts) => ORDER.filter((letter) => counts[letter]).map((letter) => `${counts[letter]} ${STATES[letter][0]}`).join(", ");

function render({ model, el }) {
  const view = new HealthView(model, el);
  return () => view.close();
}

export default { render };
