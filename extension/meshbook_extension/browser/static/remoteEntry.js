// What a bundler would write: a container in the form of module federation, by which JupyterLab loads the panel.
// Nothing is built. JupyterLab hands in the packages that extensions share; our own ES modules lie beside this file.
(() => {
  const NEEDED = ["@jupyterlab/application", "@jupyterlab/apputils", "@jupyterlab/notebook", "@jupyterlab/statusbar", "@lumino/widgets"];
  const here = document.currentScript.src;
  let scope = {};

  // A package that the application shares; it has one version of each of these.
  const load = async (name) => {
    const [version] = Object.values(scope[name] ?? {});
    if (!version) throw new Error(`Meshbook's panel needs ${name}, which this application does not share`);
    return [name, (await version.get())()];
  };

  (window._JUPYTERLAB ??= {}).meshbook = {
    init: (shared) => {
      scope = shared;
    },
    get: async () => {
      const [{ makePlugin }, ...packages] = await Promise.all([import(new URL("lab.js", here).href), ...NEEDED.map(load)]);
      const style = new URL("meshbook.css", here).href;
      return () => ({ __esModule: true, default: makePlugin(Object.fromEntries(packages), style) });
    },
  };
})();
