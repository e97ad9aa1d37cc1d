// The words on a cell that is held up, with the buttons that help while it runs.
import { Answer, make, makeButton } from "./parts.js";

function renderNotice({ model, el }) {
  const ranks = model.get("ranks");
  const act = (action, on) => () => model.send({ kind: "act", action, ranks: on });
  const pdb = ranks.length === 1 ? [makeButton("", `pdb ${ranks[0]}`, act("pdb", ranks), "stops this rank at the next line of your code")] : [];
  const buttons = make("div", "mb-buttons", makeButton("", "Stacks", act("stacks", [])), ...pdb, makeButton("", "Interrupt", act("interrupt", [])));
  const answer = new Answer();
  const words = make("pre", "mb-words", model.get("words"));
  const onMessage = (message) => message?.kind === "answer" && answer.show(message);
  const onOpen = () => {
    buttons.hidden = !model.get("is_open");
  };
  model.on("msg:custom", onMessage);
  model.on("change:is_open", onOpen);
  onOpen();
  el.append(make("div", "meshbook mb-notice", words, buttons, answer.element));
  return () => {
    model.off("msg:custom", onMessage);
    model.off("change:is_open", onOpen);
  };
}

export default { render: renderNotice };
