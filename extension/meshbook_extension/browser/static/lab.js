// The plugin of JupyterLab 4 and Notebook 7: a panel beside the notebook, the mesh in the status bar, marks on cells that
// run on the ranks, and the tables of saved widgets whose kernel is gone.
import { make } from "./parts.js";
import { HealthView } from "./health.js";

const TARGET = "meshbook"; // of the comm that the kernel's side registers
const TOGGLE = "meshbook:toggle-panel";
const WIDGET_VIEW = "application/vnd.jupyter.widget-view+json";
const MARK_AGAIN_MS = 200;
const GONE = {
  restarting: "the kernel is restarting",
  autorestarting: "the kernel has died and is restarting",
  terminating: "the kernel is shutting down",
  dead: "the kernel has died. Restart it, then run %mesh",
};

// The way to the kernel of one notebook, in the form of a widget's model: it can be given to a `HealthView`.
class Link {
  constructor(panel, onSession) {
    this.panel = panel;
    this.context = panel.sessionContext;
    this.onSession = onSession;
    this.listeners = {};
    this.session = { mesh: "", text: "", auto: false };
    this.values = { layout_of: {}, live: { phase: "none" }, gone: "" };
    this.context.statusChanged.connect(this.onStatus, this);
    this.context.kernelChanged.connect(this.onKernel, this);
    this.onStatus(this.context, this.context.kernelDisplayStatus);
  }

  get(name) {
    return this.values[name];
  }
  on(event, listener) {
    (this.listeners[event] ??= new Set()).add(listener);
  }
  off(event, listener) {
    this.listeners[event]?.delete(listener);
  }
  send(content) {
    this.asked = content.kind === "look" ? content : this.asked; // told again to the next kernel
    this.comm?.send(content);
  }

  emit(event, data) {
    for (const listener of this.listeners[event] ?? []) listener(data);
  }
  set(name, value) {
    this.values[name] = value;
    this.emit(`change:${name}`);
  }

  onKernel() {
    this.comm = null;
    this.tried = false;
    this.tell({ mesh: "", text: "", auto: false });
    this.set("live", { phase: "none" });
  }

  onStatus(_context, status) {
    const isBack = status === "idle" || status === "busy"; // until then it may still start
    const gone = this.context.session?.kernel ? (GONE[status] ?? (isBack ? "" : this.values.gone)) : "the notebook has no kernel";
    if (gone) this.comm = null;
    if (gone !== this.values.gone) {
      this.values.gone = gone;
      if (gone) this.set("live", this.values.live);
      else this.onKernel();
    }
    if (status === "idle" && !this.tried && this.mentionsMesh()) this.connect();
  }

  mentionsMesh() {
    const cells = this.panel.content.model?.sharedModel.cells ?? [];
    return this.context.session?.kernel?.name === "meshbook" || cells.some((cell) => /\bmesh/.test(cell.getSource()));
  }

  // Without our extension in the kernel the comm is closed at once; a cell that loads it makes another try.
  connect() {
    const kernel = this.context.session?.kernel;
    if (this.comm || !kernel || kernel.handleComms === false) return;
    this.tried = true;
    const comm = (this.comm = kernel.createComm(TARGET));
    comm.onMsg = (message) => this.comm === comm && this.onMessage(message.content.data);
    comm.onClose = () => {
      if (this.comm === comm) this.onKernel();
      this.tried = true;
    };
    comm.open({});
    if (this.asked) comm.send(this.asked);
  }

  onMessage(data) {
    if (data.kind === "session") this.tell(data);
    else if (data.kind === "layout") this.set("layout_of", data.layout);
    else if (data.kind === "live") this.set("live", data.live);
    else this.emit("msg:custom", data);
  }

  tell(session) {
    this.session = session;
    this.onSession(this);
  }

  close() {
    this.context.statusChanged.disconnect(this.onStatus, this);
    this.context.kernelChanged.disconnect(this.onKernel, this);
    this.comm?.close();
    this.comm = null;
  }
}

// Whether a cell runs on the ranks, by its first line of code.
function runsOnRanks(source, isAuto) {
  const first = source.split("\n").find((line) => line.trim() && !line.trimStart().startsWith("#"))?.trimStart() ?? "";
  return /^%%mesh\b/.test(first) || (isAuto && first !== "" && !/^%%|^%mesh\b/.test(first));
}

function markCells({ panel, session }) {
  for (const cell of panel.content.widgets) {
    const marked = cell.model.type === "code" && runsOnRanks(cell.model.sharedModel.getSource(), session.auto && session.mesh);
    cell.node.toggleAttribute("data-meshbook", marked);
    const prompt = cell.node.querySelector(".jp-InputArea-prompt");
    if (prompt) prompt.title = marked ? `runs on the ranks${session.mesh ? ` of "${session.mesh}"` : ""}` : "";
  }
}

// Our widgets in a notebook that was opened again: without their kernel they show the table that was saved with them.
async function showTables(panel) {
  await Promise.all([panel.revealed, panel.sessionContext.ready]);
  const kernel = panel.sessionContext.session?.kernel;
  const reply = await kernel?.requestCommInfo({ target_name: "jupyter.widget" });
  const living = reply?.content.comms ?? {};
  for (const { model } of panel.content.widgets) {
    for (let i = 0; i < (model.outputs?.length ?? 0); i++) {
      const output = model.outputs.get(i);
      const { [WIDGET_VIEW]: view, ...data } = output.data;
      if (view && output.metadata.meshbook && !(view.model_id in living)) output.setData({ data, metadata: output.metadata });
    }
  }
}

export function makePlugin(shared, style) {
  const { ILayoutRestorer } = shared["@jupyterlab/application"];
  const { ICommandPalette } = shared["@jupyterlab/apputils"];
  const { INotebookTracker, NotebookActions } = shared["@jupyterlab/notebook"];
  const { IStatusBar } = shared["@jupyterlab/statusbar"];
  const { Widget } = shared["@lumino/widgets"];

  const activate = (app, tracker, statusBar, palette, restorer) => {
    document.head.append(Object.assign(make("link"), { rel: "stylesheet", href: style }));
    const links = new Map();
    const current = () => links.get(tracker.currentWidget);

    const panel = new Widget();
    panel.id = "meshbook-panel";
    panel.addClass("mb-panel");
    Object.assign(panel.title, { label: "Mesh", caption: "The ranks of this notebook (Ctrl+Alt+M)" });
    app.shell.add(panel, "right", { rank: 850 });
    restorer?.add(panel, "meshbook");
    let view = null;
    const showPanel = () => {
      const link = current() ?? null;
      if (view && view.model === link) return;
      view?.close();
      view = null;
      panel.node.replaceChildren();
      if (link) view = new HealthView(link, panel.node, true);
    };

    const status = new Widget({ node: make("span", "mb-status") });
    status.node.onclick = () => app.commands.execute(TOGGLE);
    const item = statusBar && { item: status, align: "left", rank: 90, isActive: () => Boolean(current()?.session.mesh) };
    if (item) statusBar.registerStatusItem("meshbook:status", item);
    const showSession = (link) => {
      markCells(link);
      if (link !== current()) return;
      const { mesh, text, auto } = link.session;
      status.node.textContent = `mesh ${mesh}: ${text}${auto ? " · auto: every cell runs there" : ""}`;
      status.node.dataset.auto = String(auto);
      status.node.title = auto ? "%mesh auto off ends it; %%local runs one cell here" : "Show the ranks (Ctrl+Alt+M)";
      status.setHidden(!mesh);
    };

    const add = (notebook) => {
      const link = new Link(notebook, showSession);
      links.set(notebook, link);
      let timer = 0;
      notebook.content.modelContentChanged.connect(() => {
        clearTimeout(timer);
        timer = setTimeout(() => markCells(link), MARK_AGAIN_MS);
      });
      notebook.disposed.connect(() => {
        link.close();
        links.delete(notebook);
        showPanel();
      });
      void showTables(notebook).then(() => markCells(link));
      showPanel();
    };
    tracker.forEach(add);
    tracker.widgetAdded.connect((_tracker, notebook) => add(notebook));
    tracker.currentChanged.connect(() => {
      showPanel();
      if (current()) showSession(current());
      else status.hide();
    });
    NotebookActions.executed.connect((_actions, { notebook, cell }) => {
      const link = [...links.values()].find((each) => each.panel.content === notebook);
      if (link && /\bmesh/.test(cell.model.sharedModel.getSource())) link.connect();
    });
    showPanel();

    app.commands.addCommand(TOGGLE, {
      label: "Show or Hide the Mesh Panel",
      execute: () => {
        if (panel.isVisible) app.shell.collapseRight(panel.id);
        else {
          app.shell.expandRight?.(panel.id);
          app.shell.activateById(panel.id);
        }
      },
    });
    app.commands.addKeyBinding({ command: TOGGLE, keys: ["Accel Alt M"], selector: "body" });
    palette?.addItem({ command: TOGGLE, category: "Meshbook" });
  };

  const optional = [IStatusBar, ICommandPalette, ILayoutRestorer];
  return { id: "meshbook:panel", description: "The ranks of a notebook", autoStart: true, requires: [INotebookTracker], optional, activate };
}
