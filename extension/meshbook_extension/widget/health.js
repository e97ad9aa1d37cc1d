// The health widget in the browser. Two synced traits come in: `layout_of` (axes, hosts, pids; rarely) and `live` (each
// second). Messages go out: {kind: "look"} while this view can be seen, {kind: "act"} for a button.
// Texts come from ranks and are untrusted: they become text nodes and attributes, never HTML.

const STATES = {
  // letter on the wire: [what it is called, what a tile shows]; in the order of concern
  D: ["dead", "×"],
  U: ["silent", "?"],
  T: ["stopped", "="],
  P: ["stopped in pdb", "P"],
  X: ["interrupted", "!"],
  S: ["starting", "S"],
  C: ["in a collective", "C"],
  B: ["busy", "B"],
  I: ["idle", "I"],
};
const ORDER = Object.keys(STATES);
const ACTIONS = { interrupt: "Interrupt", stacks: "Stacks", pdb: "pdb", logs: "Logs", heal: "Heal" };
const GONE_S = 15; // without news for so long, the widget shows the past
const LOOK_AGAIN_MS = 10_000;
const LARGE = 64; // up to here each rank has a tile with its number
const SINGLE = 256; // up to here each rank has a tile
const BLOCKS = 512; // at most so many tiles for more ranks than that
const PLACES = 5; // so many of the places where ranks are
const CALM = ["C", "B", "I"]; // states of a mesh that works; any other one of a single rank is shown for its whole square
const remembered = new WeakMap(); // model -> what was chosen, for a view that is made anew

const make = (tag, name, ...children) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
};
const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

const seconds = (value) => {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 100) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};
const memory = (mb) => {
  if (mb < 1000) return `${mb} MB`;
  const gb = mb / 1000;
  return gb < 1000 ? `${gb.toPrecision(3)} GB` : `${(gb / 1000).toPrecision(3)} TB`;
};
const rate = (kb) => (kb < 1000 ? `${kb} kB/s` : `${memory(kb < 1e6 ? Number((kb / 1000).toPrecision(3)) : Math.round(kb / 1000))}/s`);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const ranges = (ranks, most = 12) => {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const shown = runs.slice(0, most).map(([low, high]) => (low === high ? `${low}` : high === low + 1 ? `${low},${high}` : `${low}-${high}`));
  return shown.join(",") + (runs.length > most ? ",…" : "");
};
const nameRanks = (ranks, most) => `${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks, most)}`;

// ---- the mesh, as tiles ------------------------------------------------------------------------------------------

// A tile stands for the ranks `from` up to `to` (positions in the columns), a row for tiles with equal leading axes.
function arrange(layout) {
  const { axes, sizes } = layout;
  const count = layout.pids.length;
  const single = count <= SINGLE;
  let kept = axes.length;
  let tiles = count;
  if (!single) {
    kept = 0;
    tiles = 1;
    while (kept < sizes.length && tiles * sizes[kept] <= BLOCKS) tiles *= sizes[kept++];
    while (kept > 1 && tiles * 2 > count) tiles /= sizes[--kept]; // blocks of one rank are no blocks
  }
  const regular = sizes.reduce((product, size) => product * size, 1) === count && (single || tiles > 16);
  if (!regular) {
    const block = single ? 1 : Math.ceil(count / SINGLE);
    return { count, block, caption: block > 1 ? `one square per ${plural(block, "rank")}` : "", rows: [rowOf("", 0, Math.ceil(count / block), block, count)] };
  }
  const block = count / tiles;
  const columns = kept > 1 ? sizes[kept - 1] : tiles;
  const leading = kept > 1 && tiles / columns > 1 ? kept - 1 : 0;
  const rows = [];
  if (leading) {
    for (let row = 0; row < tiles / columns; row++) {
      rows.push(rowOf(pointText(axes, sizes, leading, row), row * columns, columns, block, count));
    }
  } else rows.push(rowOf("", 0, tiles, block, count));
  const across = leading ? `${axes[leading]} from left to right` : "";
  const square = `one square per index of ${axes.slice(0, kept).join(" and ")}, ${plural(block, "rank")} each`;
  return { count, block, rows, caption: block > 1 ? [square, across].filter(Boolean).join("; ") : across };
}

function rowOf(label, first, length, block, count) {
  const tiles = [];
  for (let i = first; i < first + length; i++) tiles.push({ from: i * block, to: Math.min(count, (i + 1) * block) });
  return { label, tiles };
}

function pointText(axes, sizes, upTo, index) {
  const parts = [];
  for (let axis = upTo - 1; axis >= 0; axis--) {
    parts.unshift(`${axes[axis]}=${index % sizes[axis]}`);
    index = Math.floor(index / sizes[axis]);
  }
  return parts.join(" ");
}

function countStates(states, from = 0, to = states.length) {
  const counts = {};
  for (let i = from; i < to; i++) counts[states[i]] = (counts[states[i]] || 0) + 1;
  return counts;
}
const worst = (counts) => ORDER.find((letter) => counts[letter]) || "I";

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

class Tiles {
  constructor(onShow, onChoose) {
    this.element = make("div", "mb-rows");
    this.onShow = onShow;
    this.onChoose = onChoose;
    this.tiles = [];
    this.element.addEventListener("pointerover", (event) => this.#show(event));
    this.element.addEventListener("focusin", (event) => this.#show(event));
    this.element.addEventListener("pointerleave", () => onShow(null));
    this.element.addEventListener("focusout", () => onShow(null));
    this.element.addEventListener("click", (event) => {
      const tile = this.#of(event);
      if (tile) onChoose(tile);
    });
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  #of(event) {
    const button = event.target.closest?.(".mb-tile");
    return button ? this.tiles[Number(button.dataset.index)] : null;
  }
  #show(event) {
    const tile = this.#of(event);
    if (tile) this.onShow(tile);
  }
  #move(event) {
    const index = this.tiles.findIndex((tile) => tile.button === event.target);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (index < 0 || !step) return;
    event.preventDefault();
    event.stopPropagation(); // the notebook would move to another cell
    const next = this.tiles[Math.max(0, Math.min(this.tiles.length - 1, index + step))];
    this.tiles[index].button.tabIndex = -1;
    next.button.tabIndex = 0;
    next.button.focus();
  }

  build(arranged, large) {
    this.large = large;
    this.block = arranged.block;
    this.tiles = [];
    this.grids = [];
    this.longest = Math.max(1, ...arranged.rows.map((row) => row.tiles.length));
    const labelled = arranged.rows.some((row) => row.label);
    this.labelWidth = labelled ? 12 + Math.ceil(6.8 * Math.max(...arranged.rows.map((row) => row.label.length))) : 0;
    this.element.replaceChildren(
      ...arranged.rows.map((row) => {
        const grid = make("div", "mb-tiles");
        this.grids.push(grid);
        for (const tile of row.tiles) {
          tile.button = make("button", "mb-tile");
          tile.button.type = "button";
          tile.button.tabIndex = this.tiles.length ? -1 : 0;
          tile.button.dataset.index = this.tiles.length;
          if (large) {
            tile.letter = make("i");
            tile.button.append(make("b", "", tile.name), tile.letter);
          }
          this.tiles.push(tile);
          grid.append(tile.button);
        }
        const element = make("div", "mb-row", ...(row.label ? [make("div", "mb-row-label", row.label)] : []), grid);
        if (row.label) {
          element.setAttribute("role", "group");
          element.setAttribute("aria-label", row.label);
        }
        return element;
      }),
    );
    this.element.classList.toggle("mb-small", !large);
    const [widest, narrowest, height, gap] = !large ? [24, 20, 22, 3] : this.tiles.length > 16 ? [48, 30, 42, 5] : [62, 34, 50, 6];
    Object.assign(this, { widest, narrowest, gap });
    this.element.style.setProperty("--tile-h", `${height}px`);
    this.element.style.setProperty("--gap", `${gap}px`);
    this.element.style.setProperty("--label-w", `${this.labelWidth}px`);
    this.fit(this.width || 600);
  }

  // Rows break at a multiple of 8 where they can, so that ranks stand below each other.
  fit(width) {
    this.width = width;
    const free = width - this.labelWidth + (this.gap ?? 0);
    const fitting = Math.floor(free / Math.min(this.longest, 8)) - this.gap; // 8 side by side, narrower if need be
    const tile = Math.max(this.narrowest, Math.min(this.widest, fitting));
    const room = Math.max(1, Math.floor(free / (tile + this.gap)));
    this.element.style.setProperty("--tile-w", `${tile}px`);
    const columns = room >= this.longest ? this.longest : room >= 16 ? room - (room % 8) : room >= 4 ? room - (room % 4) : room;
    this.columns = columns;
    for (const grid of this.grids || []) grid.style.setProperty("--cols", columns);
  }

  update(states, textOf, chosen) {
    for (const tile of this.tiles) {
      const counts = countStates(states, tile.from, tile.to);
      const letter = worst(counts);
      const mixed = CALM.includes(letter) && Object.keys(counts).length > 1;
      const look = mixed ? mixture(counts) : "";
      const key = letter + look;
      if (tile.key !== key) {
        tile.key = key;
        tile.button.className = `mb-tile mb-${letter}`;
        tile.button.style.background = look;
        (tile.letter ?? tile.button).textContent = STATES[letter][1];
      }
      const label = textOf(tile, counts);
      if (tile.label !== label) tile.button.setAttribute("aria-label", (tile.label = label));
      const pressed = chosen !== null && chosen.from === tile.from && chosen.to === tile.to;
      if (tile.pressed !== pressed) tile.button.setAttribute("aria-pressed", String((tile.pressed = pressed)));
    }
  }
}

// ---- one view ------------------------------------------------------------------------------------------------------

class HealthView {
  constructor(model, el) {
    this.model = model;
    this.id = crypto.randomUUID?.() ?? String(Math.random());
    this.memory = remembered.get(model) ?? { chosen: null, answer: null };
    remembered.set(model, this.memory);
    this.shown = null;
    this.stopping = new AbortController();
    this.#build(el);
    this.#listen(el);
    this.onLayout();
    this.showAnswer();
  }

  #build(el) {
    this.name = make("span", "mb-name");
    this.meta = make("span", "mb-meta");
    this.phase = make("span", "mb-phase");
    this.buttons = make("div", "mb-buttons");
    this.counts = make("ul", "mb-counts");
    this.cells = make("div");
    this.caption = make("div", "mb-caption");
    this.grid = new Tiles((tile) => this.show(tile), (tile) => this.choose(tile));
    this.memberTitle = make("div", "mb-caption");
    this.members = new Tiles((tile) => this.show(tile), (tile) => this.chooseMember(tile));
    this.memberBox = make("div", "mb-members", this.memberTitle, this.members.element);
    this.detail = make("div", "mb-detail");
    this.charts = { memory_mb: chartElement(), moved_kb_s: chartElement(), gpu_percent: chartElement(100) };
    this.curves = make("div", "mb-curves");
    this.errors = make("ul", "mb-errors");
    this.answerTitle = make("b");
    this.answerText = make("pre");
    this.answerText.tabIndex = 0;
    this.copyButton = make("button", "mb-plain", "Copy");
    this.copyButton.onclick = () => this.copy();
    const close = make("button", "mb-plain", "Close");
    close.onclick = () => {
      this.memory.answer = null;
      this.showAnswer();
    };
    for (const button of [this.copyButton, close]) button.type = "button";
    this.answer = make("section", "mb-answer", make("header", "", this.answerTitle, this.copyButton, close), this.answerText);
    this.answer.setAttribute("aria-live", "polite");
    this.note = make("div", "mb-note");
    this.places = make("ul", "mb-places");
    this.left = make("div", "", this.caption, this.grid.element, this.memberBox, this.places);
    const charts = make("div", "mb-charts", ...Object.values(this.charts).map((chart) => chart.element));
    this.body = make("div", "mb-body", this.left, this.detail, charts);
    const head = make("div", "mb-head", this.name, this.meta, this.phase, this.buttons);
    this.card = make("div", "mb-card", head, this.counts, this.cells, this.body, this.curves, this.errors, this.answer, this.note);
    this.root = make("div", "meshbook", this.card);
    el.append(this.root);
  }

  #listen(el) {
    const { signal } = this.stopping;
    this.onLive = this.onLive.bind(this);
    this.onLayout = this.onLayout.bind(this);
    this.onMessage = this.onMessage.bind(this);
    this.model.on("change:live", this.onLive);
    this.model.on("change:layout_of", this.onLayout);
    this.model.on("msg:custom", this.onMessage);
    this.visible = false;
    this.watcher = new IntersectionObserver((entries) => {
      this.inSight = entries[entries.length - 1].isIntersecting;
      this.look();
    });
    this.watcher.observe(el);
    document.addEventListener("visibilitychange", () => this.look(), { signal });
    this.sizer = new ResizeObserver(() => {
      this.grid.fit(this.left.clientWidth);
      this.members.fit(this.left.clientWidth);
    });
    this.sizer.observe(this.left);
    this.clock = setInterval(() => {
      if (this.visible) this.#send({ kind: "look", view: this.id, visible: true });
    }, LOOK_AGAIN_MS);
    this.seconds = setInterval(() => this.showPhase(), 1000);
  }

  close() {
    this.stopping.abort();
    this.watcher.disconnect();
    this.sizer.disconnect();
    clearInterval(this.clock);
    clearInterval(this.seconds);
    this.model.off("change:live", this.onLive);
    this.model.off("change:layout_of", this.onLayout);
    this.model.off("msg:custom", this.onMessage);
    this.inSight = false;
    this.look();
  }

  #send(content) {
    try {
      this.model.send(content);
    } catch {
      // the kernel is gone; the phase says so
    }
  }

  look() {
    const visible = Boolean(this.inSight) && document.visibilityState === "visible";
    if (visible === this.visible) return;
    this.visible = visible;
    this.#send({ kind: "look", view: this.id, visible });
    if (visible) this.onLive();
  }

  onMessage(message) {
    if (message?.kind !== "answer") return;
    this.memory.answer = { title: String(message.title), text: String(message.text), copied: String(message.copied || message.text) };
    this.showAnswer();
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.memory.answer.copied);
      setText(this.copyButton, "Copied");
    } catch {
      getSelection().selectAllChildren(this.answerText); // a page without the right to copy: by the person's own keys
    }
  }

  showAnswer() {
    const answer = this.memory.answer;
    this.answer.hidden = !answer;
    setText(this.answerTitle, answer?.title ?? "");
    setText(this.answerText, answer?.text ?? "");
    setText(this.copyButton, "Copy");
  }

  // ---- drawing

  onLayout() {
    const layout = this.model.get("layout_of");
    if (!layout?.pids) return;
    this.layout = layout;
    this.rank = (position) => layout.ranks[position] ?? position;
    const count = layout.pids.length;
    const arranged = arrange(layout);
    for (const row of arranged.rows) for (const tile of row.tiles) tile.name = String(this.rank(tile.from));
    this.grid.build(arranged, count <= LARGE);
    this.body.classList.toggle("mb-low", count <= 16);
    this.detail.classList.toggle("mb-gpu", layout.gpu_total_mb.length > 0);
    const axes = layout.axes.map((axis, i) => `${axis}=${layout.sizes[i]}`).join(" ");
    setText(this.name, layout.name);
    setText(this.meta, `${axes ? `${axes} · ` : ""}${layout.device} · ${plural(count, "rank")} on ${plural(layout.hosts.length, "host")}`);
    setText(this.caption, arranged.caption);
    this.caption.hidden = !arranged.caption;
    const chosen = this.memory.chosen;
    if (chosen && chosen.to > count) this.memory.chosen = null;
    this.showMembers();
    this.onLive();
  }

  onLive() {
    const live = this.model.get("live");
    if (!live?.states || !this.layout || live.states.length !== this.layout.pids.length) return;
    this.live = live;
    this.arrived = Date.now();
    this.showPhase();
    if (!this.visible && this.drawn) return;
    this.drawn = true;
    this.showButtons();
    this.showCounts();
    this.showCells();
    this.grid.update(live.states, (tile, counts) => this.describeTile(tile, counts), this.memory.chosen);
    if (!this.memberBox.hidden) this.members.update(live.states, (tile, counts) => this.describeTile(tile, counts), this.memory.member ?? null);
    this.showPlaces();
    this.showDetail();
    this.showCharts();
    this.showErrors();
    this.showCurves(live.curves ?? "");
    setText(this.note, live.note);
    this.note.hidden = !live.note;
  }

  showCurves(picture) {
    this.curves.hidden = !picture;
    if (picture === this.picture) return;
    this.picture = picture;
    this.curves.innerHTML = picture; // SVG that the kernel has drawn; names in it are escaped there
  }

  showPhase() {
    if (!this.live) return;
    const silent = (Date.now() - this.arrived) / 1000;
    let phase = this.live.phase;
    if (phase === "live" && this.visible && silent > 4 * this.live.tick_s) phase = silent > GONE_S ? "gone" : "late";
    if ((this.root.dataset.phase === "gone") !== (phase === "gone")) {
      this.root.dataset.phase = phase;
      this.showButtons();
    }
    this.phase.dataset.phase = phase;
    const silence = `no news for ${seconds(Math.round(silent))}`;
    setText(this.phase, phase === "late" ? silence : phase === "gone" ? `${silence}: has the kernel restarted? Run %mesh again` : phase);
  }

  showButtons() {
    const wanted = this.live.actions.filter((action) => ACTIONS[action]);
    if (wanted.join() !== this.actions) {
      this.actions = wanted.join();
      this.buttons.replaceChildren(
        ...wanted.map((action) => {
          const button = make("button", "", ACTIONS[action]);
          button.type = "button";
          button.dataset.action = action;
          button.onclick = () => this.#send({ kind: "act", action, ranks: this.chosenRanks() });
          return button;
        }),
      );
    }
    const counts = countStates(this.live.states);
    const working = this.live.cells.length > 0 || ["B", "C", "X", "P", "T", "U"].some((letter) => counts[letter]);
    for (const button of this.buttons.children) {
      const action = button.dataset.action;
      button.disabled = this.live.phase === "ended" || this.root.dataset.phase === "gone" || (["interrupt", "pdb"].includes(action) && !working) || (action === "heal" && !counts.D);
      button.dataset.urgent = action === "heal" && counts.D ? "D" : action === "pdb" && counts.P ? "P" : "";
      const chosen = this.chosenRanks();
      button.title = chosen.length && action !== "interrupt" && action !== "heal" ? `${ACTIONS[action]}: ${nameRanks(chosen)}` : ACTIONS[action];
    }
  }

  showCounts() {
    const counts = countStates(this.live.states);
    const letters = ORDER.filter((letter) => counts[letter]).reverse();
    const key = letters.map((letter) => letter + counts[letter]).join();
    if (this.countsKey === key) return;
    this.countsKey = key;
    this.counts.replaceChildren(
      ...letters.map((letter) => {
        const mark = make("span", `mb-key mb-${letter}`, STATES[letter][1]);
        mark.setAttribute("aria-hidden", "true");
        return make("li", "", mark, make("b", "", counts[letter].toLocaleString("en")), make("span", "", STATES[letter][0]));
      }),
    );
  }

  showCells() {
    const cells = this.live.cells;
    while (this.cells.children.length > cells.length) this.cells.lastChild.remove();
    while (this.cells.children.length < cells.length) this.cells.append(cellElement());
    cells.forEach((cell, i) => showCell(this.cells.children[i].parts, cell));
  }

  describeTile(tile, counts) {
    const { states } = this.live;
    if (tile.to - tile.from === 1) {
      const what = this.what(tile.from);
      return `rank ${this.rank(tile.from)}, ${STATES[states[tile.from]][0]}${what ? `, ${what}` : ""}`;
    }
    const parts = ORDER.filter((letter) => counts[letter]).map((letter) => `${counts[letter]} ${STATES[letter][0]}`);
    return `${this.nameTile(tile)}: ${parts.join(", ")}`;
  }

  nameTile(tile) {
    if (tile.to - tile.from === 1) return `rank ${this.rank(tile.from)}`;
    const contiguous = !this.layout.ranks.length;
    return contiguous ? `ranks ${tile.from}-${tile.to - 1}` : nameRanks(this.positions(tile).map(this.rank));
  }

  positions(tile) {
    return Array.from({ length: tile.to - tile.from }, (_, i) => tile.from + i);
  }

  what(position) {
    return this.live.texts[this.live.text_of[position]] ?? "";
  }

  // Where the ranks are, equal places once: the one that stands elsewhere is seen at a glance.
  showPlaces() {
    const groups = this.live.texts.map((text) => ({ text, ranks: [] }));
    this.live.text_of.forEach((index, i) => this.live.states[i] !== "D" && groups[index].ranks.push(this.rank(i)));
    const running = groups.filter((group) => group.text && group.ranks.length).sort((a, b) => b.ranks.length - a.ranks.length);
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
    const member = this.memory.member;
    this.memory.member = member?.from === tile.from ? null : { from: tile.from, to: tile.to };
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
      tile.name = String(this.rank(tile.from));
    }
    setText(this.memberTitle, `${this.pointOf(chosen)}${this.nameTile(chosen)}`);
    this.members.build({ block: 1, rows: [row] }, size <= LARGE);
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
    return parts.length ? `${parts.join(" ")} · ` : "";
  }

  showDetail() {
    if (!this.live) return;
    const tile = this.shown ?? this.memory.member ?? this.memory.chosen ?? (this.layout.pids.length === 1 ? { from: 0, to: 1 } : null);
    if (!tile || tile.to > this.live.states.length) {
      this.detail.replaceChildren(make("h4", "", "No rank chosen"), make("p", "", "Point at a tile to see its rank; click to keep it. Stacks, pdb and Logs then mean that rank."));
      return;
    }
    const rows = tile.to - tile.from === 1 ? this.rankRows(tile.from) : this.blockRows(tile);
    const list = make("dl");
    for (const [term, text] of rows) if (text) list.append(make("dt", "", term), make("dd", "", text));
    const single = tile.to - tile.from === 1;
    this.detail.replaceChildren(make("h4", "", single ? `Rank ${this.rank(tile.from)}` : capital(this.nameTile(tile))), list);
  }

  rankRows(i) {
    const { live, layout } = this;
    const letter = live.states[i];
    const busy = live.busy_ds[i] / 10;
    const what = this.what(i);
    return [
      ["state", STATES[letter][0] + (busy > 0 && letter !== "I" ? ` for ${seconds(busy)}` : "")],
      [letter === "D" ? "cause" : "at", what.replace(/^(in|at) /, "$1 ")],
      ["point", this.pointOf({ from: i, to: i + 1 }).replace(" · ", "")],
      ["host", layout.hosts[layout.host_of[i]]],
      ["device", layout.devices[layout.device_of[i]]],
      ["pid", layout.pids[i] ? String(layout.pids[i]) : ""],
      ["memory", live.memory_mb[i] ? memory(live.memory_mb[i]) : ""],
      ["last error", live.kept_mb?.[i] ? `holds ${memory(live.kept_mb[i])}: %mesh free` : ""],
      ["GPU", live.gpu_percent[i] >= 0 ? `${live.gpu_percent[i]} % busy` : ""],
      ["filled", live.gpu_used_mb[i] ? `${memory(live.gpu_used_mb[i])} of ${memory(layout.gpu_total_mb[i])}` : ""],
      ["by torch", live.gpu_used_mb[i] ? memory(live.gpu_own_mb[i]) : ""],
      ["traffic", live.moved_kb_s[i] ? rate(live.moved_kb_s[i]) : ""],
    ];
  }

  blockRows(tile) {
    const { live, layout } = this;
    const positions = this.positions(tile);
    const counts = countStates(live.states, tile.from, tile.to);
    const sizes = positions.map((i) => live.memory_mb[i]);
    const hosts = [...new Set(positions.map((i) => layout.hosts[layout.host_of[i]]))];
    const places = {};
    for (const i of positions) if (this.what(i)) (places[this.what(i)] ??= []).push(this.rank(i));
    const busiest = Object.entries(places).sort((a, b) => b[1].length - a[1].length).slice(0, 2);
    return [
      ["state", ORDER.filter((letter) => counts[letter]).map((letter) => `${counts[letter]} ${STATES[letter][0]}`).join(", ")],
      ["point", this.pointOf(tile).replace(" · ", "")],
      [hosts.length > 1 ? "hosts" : "host", hosts.length > 3 ? `${hosts.slice(0, 2).join(", ")} and ${hosts.length - 2} more` : hosts.join(", ")],
      ["memory", `${memory(sum(sizes))}, largest ${memory(Math.max(...sizes))}`],
      ["at", busiest.map(([place, ranks]) => `${ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks.length} ranks`} ${place}`).join("; ")],
    ];
  }

  showCharts() {
    const { history, memory_mb: sizes, gpu_used_mb: used } = this.live;
    const largest = Math.max(...sizes);
    const most = sizes.length > 1 ? `most ${memory(largest)}, rank ${this.rank(sizes.indexOf(largest))}` : "";
    this.charts.memory_mb.show(history.memory_mb, `memory ${memory(sum(sizes))}`, most, memory);
    const moved = history.moved_kb_s;
    const peak = Math.max(0, ...moved.map((point) => point[2]));
    const now = moved.length ? moved[moved.length - 1][1] : 0;
    this.charts.moved_kb_s.show(peak ? moved : [], `traffic ${rate(now)}${sizes.length > 1 ? " a rank" : ""}`, `peak ${rate(peak)}`, rate);
    const percents = history.gpu_percent;
    const busy = percents.length ? `GPU ${percents[percents.length - 1][1]} %` : "GPU";
    const full = used.length ? `${memory(sum(used))} of ${memory(sum(this.layout.gpu_total_mb))} used` : "";
    this.charts.gpu_percent.show(percents.length ? percents : used.map(() => [0, 0, 0]).slice(0, 1), busy, full, (value) => `${value} %`);
  }

  showErrors() {
    const key = JSON.stringify(this.live.errors);
    if (key === this.errorsKey) return;
    this.errorsKey = key;
    this.errors.hidden = !this.live.errors.length;
    this.errors.replaceChildren(
      ...[...this.live.errors].reverse().map((error) => {
        const ranks = /^\d+$/.test(error.ranks) ? "rank" : "ranks";
        const at = error.at ? new Date(1000 * error.at).toTimeString().slice(0, 8) : "";
        const place = error.where || error.what;
        return make("li", "", make("b", "", `${ranks} ${error.ranks}`), make("code", "", error.text), make("span", "", [place, at].filter(Boolean).join(" · ")));
      }),
    );
  }
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function cellElement() {
  const text = make("span");
  const side = make("span");
  const fill = make("div", "mb-fill");
  const least = make("div", "mb-least");
  const track = make("div", "mb-track", fill, least);
  const element = make("div", "mb-cell", make("div", "mb-cell-text", text, side), track);
  track.setAttribute("role", "progressbar");
  element.parts = { text, side, fill, least, track };
  return element;
}

function showCell({ text, side, fill, least, track }, cell) {
  const bar = cell.progress;
  const ended = cell.ended ? ` · ${cell.ended} of ${plural(cell.ranks, "rank")} ended` : ` · ${plural(cell.ranks, "rank")}`;
  setText(text, `${cell.what} runs for ${seconds(cell.seconds)}${ended}`);
  const share = bar ? bar.mean : cell.ended / cell.ranks;
  const behind = bar && bar.ranks > 1 && bar.mean - bar.least > 0.02;
  const words = bar ? [`${bar.title ? `${bar.title}: ` : ""}${Math.floor(100 * bar.mean)} %`] : [];
  if (behind) words.push(`rank ${bar.slowest} at ${Math.floor(100 * bar.least)} %`);
  if (bar?.left) words.push(`${bar.left} left`);
  setText(side, words.join(" · "));
  track.dataset.unknown = String(!bar && !cell.ended);
  track.setAttribute("aria-label", cell.what);
  if (bar || cell.ended) track.setAttribute("aria-valuenow", String(Math.round(100 * share)));
  else track.removeAttribute("aria-valuenow");
  fill.style.width = `${bar || cell.ended ? 100 * share : 100}%`;
  least.hidden = !behind;
  if (behind) least.style.left = `${100 * bar.least}%`;
}

// A line at the median of the ranks, in a band from the least to the largest. top: of the scale; else as the values are.
function chartElement(top = 0) {
  const svgTag = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const svg = svgTag("svg", { viewBox: "0 0 119 44", preserveAspectRatio: "none", role: "img" });
  const [area, band, line] = ["area", "band", "line"].map((name) => svgTag("path", { class: name }));
  svg.append(svgTag("line", { x1: 0, x2: 119, y1: 43.5, y2: 43.5 }), area, band, line);
  const texts = [make("span"), make("span")];
  const element = make("div", "mb-chart", make("div", "mb-chart-text", ...texts), svg);
  const show = (points, left, right, format) => {
    element.hidden = !points.length;
    if (!points.length) return;
    setText(texts[0], left);
    setText(texts[1], right);
    const [least, middle, largest] = points[points.length - 1].map(format);
    svg.setAttribute("aria-label", `${left}: ${least} to ${largest}, median ${middle}`);
    element.title = least === largest ? "" : `of the ranks: least ${least}, median ${middle}, most ${largest}`;
    const shown = points.length > 1 ? points : [points[0], points[0]];
    const most = top || Math.max(1, ...shown.map((point) => point[2])) * 1.15;
    const at = (which) => shown.map((point, i) => `${120 - shown.length + i},${(43 - (40 * point[which]) / most).toFixed(1)}`); // the newest stands at the right
    const low = at(0);
    line.setAttribute("d", `M${at(1).join("L")}`);
    band.setAttribute("d", `M${at(2).join("L")}L${low.reverse().join("L")}Z`);
    area.setAttribute("d", `M${at(1).join("L")}L119,44L${120 - shown.length},44Z`);
  };
  return { element, show };
}

function render({ model, el }) {
  const view = new HealthView(model, el);
  return () => view.close();
}

export default { render };
