// The parts of the card above and below the ranks: cells with their progress, places, failures.
import { age, fit, make, makeButton, nameRanks, plural, setAll, setText } from "./parts.js";

const PLACES = 5; // so many of the places where ranks are

export function makeProgress() {
  const element = make("div");
  const show = ({ live }) => {
    const tracks = fit(element, live.cells.length, () => make("div", "mb-track", make("div", "mb-fill"), make("div", "mb-least")));
    live.cells.forEach(({ what, progress, ended, ranks }, i) => {
      const track = tracks[i];
      const [fill, least] = track.children;
      const percent = 100 * (progress ? progress.mean : ended / ranks);
      const isKnown = Boolean(progress || ended);
      setAll(track, { role: "progressbar", "aria-label": what, title: what, "data-unknown": !isKnown });
      if (isKnown) track.setAttribute("aria-valuenow", Math.round(percent));
      else track.removeAttribute("aria-valuenow");
      fill.style.width = `${isKnown ? percent : 100}%`;
      least.hidden = !progress || progress.mean - progress.least < 0.02;
      if (progress) least.style.left = `${100 * progress.least}%`;
    });
  };
  return { element, show };
}

// Where the ranks of tiles are, equal places once.
export function makePlaces() {
  const element = make("ul", "mb-places");
  const show = (mesh) => {
    const places = mesh.placesOf(mesh.all, "D");
    const shown = places.slice(0, places.length > PLACES ? PLACES - 1 : PLACES);
    const lines = fit(element, shown.length, () => make("li", "", make("b"), make("code"), make("span")));
    shown.forEach(({ text, ranks }, i) => {
      const [who, place, more] = lines[i].children;
      const named = nameRanks(ranks, 5);
      setText(who, named.endsWith("…") ? plural(ranks.length, "rank") : named);
      setText(place, text);
      setText(more, i === shown.length - 1 && places.length > shown.length ? `and ${places.length - shown.length} other places` : "");
    });
    element.hidden = !shown.length;
  };
  return { element, show };
}

// Newest first, with their age; those whose ranks have run well since are grey. dismiss(number): a button was pressed.
export function makeFailures(dismiss) {
  const element = make("ul", "mb-errors");
  const line = (error) => {
    const ranks = `${/^\d+$/.test(error.ranks) ? "rank" : "ranks"} ${error.ranks}`;
    const button = makeButton("mb-plain mb-dismiss", "×", () => dismiss(error.number), "Dismiss");
    button.setAttribute("aria-label", `Dismiss: ${ranks}`);
    const side = [error.where || error.what, error.settled ? "ran well since" : "", error.age && `${error.age} ago`];
    const parts = [make("b", "", ranks), make("code", "", error.text), make("span", "", side.filter(Boolean).join(" · "))];
    return make("li", error.settled ? "mb-settled" : "", ...parts, ...(error.number ? [button] : []));
  };
  let drawn = "";
  const show = ({ live }) => {
    const now = Date.now() / 1000;
    const newest = [...live.errors].sort((a, b) => (b.at || now) - (a.at || now));
    const errors = newest.map((error) => ({ ...error, age: error.at ? age(Math.max(0, now - error.at)) : "" }));
    const key = JSON.stringify(errors);
    if (key === drawn) return;
    drawn = key;
    element.hidden = !errors.length;
    element.replaceChildren(...errors.map(line));
  };
  return { element, show };
}
