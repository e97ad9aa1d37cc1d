// The health of a mesh in the browser: one sentence, the ranks, charts, failures, and buttons that help now.
// Two synced traits come in: `layout_of` (axes, hosts, pids; rarely) and `live` (each second). Messages go out: {kind:
// "look"} while this view can be seen, {kind: "act"} for a button, {kind: "dismiss"} for a failure.
import { Answer, age, make, makeButton, makeTerms, nameRanks, plural, setText } from "./parts.js";
import { Mesh } from "./mesh.js";
import { ROWS, Rows, Tiles, arrange, makeIcon, rowOf } from "./ranks.js";
import { makeCharts } from "./charts.js";
import { makeFailures, makePlaces, makeProgress } from "./panes.js";

const ACTIONS = { heal: "Heal", stacks: "Stacks", pdb: "pdb", interrupt: "Interrupt" };
const SECTIONS = { jobs: "Jobs", variables: "Variables", logs: "Logs" };
const GONE_S = 15; // without news for so long, the view shows the past
const LOOK_AGAIN_MS = 10_000;
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
    this.progress = makeProgress();
    this.caption = make("div", "mb-caption");
    this.rows = new Rows((tile) => this.choose(tile));
    this.tiles = new Tiles((tile) => this.show(tile), (tile) => this.choose(tile));
    this.memberTitle = make("div", "mb-caption");
    this.members = new Tiles((tile) => this.show(tile), (tile) => this.chooseMember(tile));
    this.memberBox = make("div", "mb-members", this.memberTitle, this.members.element);
    this.places = makePlaces();
    this.charts = makeCharts();
    this.curves = make("div", "mb-curves");
    this.failures = makeFailures((number) => this.#send({ kind: "dismiss", error: number }));
    this.answer = new Answer(() => (this.memory.answer = null));
    this.note = make("div", "mb-note");
    this.sections = make("div", "mb-sections");
    this.detail = make("div", "mb-detail");
    this.detail.popover = "manual";
    this.detail.hidden = !this.detail.showPopover; // an old browser: labels of tiles tell the same
    this.empty = make("div", "mb-empty");
    this.#buildSections();
    const head = make("div", "mb-head", this.say, this.meta, make("div", "mb-tools", this.buttons, this.tabs));
    this.ranks = make("div", "mb-ranks", this.caption, this.rows.element, this.tiles.element, this.memberBox, this.places.element);
    const above = [this.progress.element, this.ranks, this.charts.element];
    this.body = make("div", "mb-body", ...above, this.curves, this.failures.element, this.answer.element, this.note, this.sections);
    this.root = make("div", this.isPanel ? "meshbook mb-dock" : "meshbook", make("div", "mb-card", head, this.empty, this.body), this.detail);
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
      this.inSight = entries.at(-1).isIntersecting;
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
    if (this.visible && this.live?.states) this.failures.show(this);
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
    const mesh = new Mesh(layout, null);
    const arranged = arrange(mesh);
    this.hasRows = mesh.count <= ROWS;
    this.rows.element.hidden = !this.hasRows;
    this.tiles.element.hidden = this.hasRows;
    this.grid = this.hasRows ? this.rows : this.tiles;
    this.grid.build(mesh, arranged);
    setText(this.caption, arranged.caption);
    this.caption.hidden = this.hasRows || !arranged.caption;
    if (this.memory.chosen?.to > mesh.count) this.memory.chosen = this.memory.member = null;
    this.showMembers(mesh);
    this.onLive();
  }

  onLive() {
    const live = this.model.get("live");
    if (!live?.phase) return;
    this.arrived = Date.now();
    if (!live.states || live.states.length !== this.layout?.pids.length) {
      this.showEmpty(live.phase === "none" ? live : null);
      return;
    }
    this.live = live;
    const mesh = (this.mesh = new Mesh(this.layout, live));
    this.showEmpty(null);
    this.showState();
    if (!this.visible && this.drawn) return;
    this.drawn = true;
    this.memory.charts ||= this.isWorking();
    this.progress.show(mesh);
    this.grid.update(mesh, this.memory.chosen);
    if (!this.memberBox.hidden) this.members.update(mesh, this.memory.member);
    this.places.element.hidden = this.hasRows; // rows say it themselves
    if (!this.hasRows) this.places.show(mesh);
    this.showDetail();
    this.showCharts();
    this.failures.show(mesh);
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
    return this.isLive() && this.mesh.isWorking;
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
    const { helps = [], ranks = [] } = this.live.say ?? {};
    const wanted = ["stacks", ...(this.isWorking() ? ["pdb", "interrupt"] : []), ...(this.live.states?.includes("D") ? ["heal"] : [])];
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

  showCharts() {
    this.charts.element.hidden = !this.memory.charts;
    if (this.memory.charts) this.charts.show(this.mesh);
  }

  showCurves(picture) {
    this.curves.hidden = !picture;
    if (picture === this.picture) return;
    this.picture = picture;
    this.curves.innerHTML = picture; // SVG that the kernel has drawn; names in it are escaped there
  }

  // ---- choosing

  show(tile) {
    this.shown = tile;
    this.showDetail();
  }

  choose(tile) {
    this.memory.chosen = toggled(this.memory.chosen, tile);
    this.memory.member = null;
    this.showMembers();
    this.onLive();
  }

  chooseMember(tile) {
    this.memory.member = toggled(this.memory.member, tile);
    this.onLive();
  }

  chosenRanks() {
    const tile = this.memory.member ?? this.memory.chosen;
    return tile && this.mesh ? this.mesh.ranksOf(tile) : [];
  }

  // The ranks of a chosen square, one by one.
  showMembers(mesh = this.mesh) {
    const chosen = this.memory.chosen;
    const size = chosen ? chosen.to - chosen.from : 0;
    this.memberBox.hidden = size < 2;
    if (size < 2) return;
    setText(this.memberTitle, [mesh.pointOf(chosen), nameRanks(mesh.ranksOf(chosen))].filter(Boolean).join(" · "));
    this.members.build(mesh, { block: 1, rows: [rowOf("", chosen.from, size, 1, chosen.to)] });
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
    const title = single ? `Rank ${this.mesh.rank(tile.from)}` : nameRanks(this.mesh.ranksOf(tile));
    const icon = single ? makeIcon(this.live.states[tile.from]) : "";
    this.detail.replaceChildren(make("h4", "", icon, title), makeTerms(this.mesh.detailOf(tile)));
    if (!isOpen) this.detail.showPopover?.();
    const [at, box] = [tile.button.getBoundingClientRect(), this.detail.getBoundingClientRect()];
    const below = at.bottom + 6 + box.height < innerHeight || at.top < box.height + 6;
    this.detail.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.width - 8))}px`;
    this.detail.style.top = `${below ? at.bottom + 6 : at.top - box.height - 6}px`;
  }
}

const toggled = (chosen, { from, to }) => (chosen?.from === from && chosen.to === to ? null : { from, to });

function render({ model, el }) {
  const view = new HealthView(model, el);
  return () => view.close();
}

export default { render };
