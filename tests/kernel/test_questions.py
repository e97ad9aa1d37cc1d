"""input() and getpass() on ranks: the notebook asks, once for all ranks that ask the same."""

from __future__ import annotations

import pytest

from tests.kernel.conftest import Kernel
from tests.kernel.typed_cells import run_typing

NAME = """%%mesh
name = input("name: ")
print("hello", name)
name"""


@pytest.fixture(scope="module")
def kernel(shared_kernel: Kernel) -> Kernel:
    assert shared_kernel.run("%mesh spawn gpus=4 --device cpu").ok
    return shared_kernel


def test_a_question_of_all_ranks_is_asked_once_and_the_answer_goes_to_all(kernel: Kernel) -> None:
    cell = run_typing(kernel, NAME, ["ada"])
    assert cell.ok, cell.plain
    assert cell.prompts == ["[0-3] name: "] and cell.hidden == []
    assert "[0-3] hello ada" in cell.plain and "stopped at" not in cell.plain
    assert kernel.value("list(_mesh.values())") == "['ada', 'ada', 'ada', 'ada']"


def test_what_getpass_asks_is_hidden_and_stays_out_of_the_output(kernel: Kernel) -> None:
    code = "%%mesh\nimport getpass\nkey = getpass.getpass('key: ')\nif rank == 1: more = getpass.getpass()\nlen(key)"
    cell = run_typing(kernel, code, ["s3cret", "again"])
    assert cell.ok, cell.plain
    assert cell.prompts == cell.hidden == ["[0-3] key: ", "[1] Password: "]
    shown = "".join(content.get("text", "") for kind, content in cell.messages if kind != "typed")
    assert "s3cret" not in shown and "GetPassWarning" not in shown
    assert kernel.value("list(_mesh.values())") == "[6, 6, 6, 6]"


def test_different_questions_come_one_after_the_other(kernel: Kernel) -> None:
    cell = run_typing(kernel, "%%mesh\nint(input(f'{rank // 2}? ')) + rank", ["10", "20"])
    assert cell.ok, cell.plain
    assert cell.prompts == ["[0,1] 0? ", "[2,3] 1? "]
    assert kernel.value("list(_mesh.values())") == "[10, 11, 22, 23]"


def test_one_rank_asks_while_the_others_wait_for_it(kernel: Kernel) -> None:
    code = "%%mesh\nt = torch.tensor([float(input('lr: '))] if rank == 0 else [0.0])\ndist.broadcast(t, 0)\nt.item()"
    cell = run_typing(kernel, code, ["0.5"])
    assert cell.ok, cell.plain
    assert cell.prompts == ["[0] lr: "]
    assert kernel.value("list(_mesh.values())") == "[0.5, 0.5, 0.5, 0.5]"


def test_a_call_of_the_notebook_asks_too(kernel: Kernel) -> None:
    cell = run_typing(kernel, "def ask(): return input('how many? ')\nprint(procs.execute(ask).get().values())", ["3"])
    assert cell.ok and cell.prompts == ["[0-3] how many? "], cell.plain
    assert "['3', '3', '3', '3']" in cell.plain


def test_an_interrupt_in_place_of_an_answer_ends_the_cell(kernel: Kernel) -> None:
    cell = run_typing(kernel, NAME, [lambda kernel: kernel.manager.interrupt_kernel()])
    assert not cell.ok and "Interrupt" in cell.reply["ename"], cell.reply
    assert kernel.run("%%mesh\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == 4").ok


def test_no_answer_is_the_end_of_input(kernel: Kernel) -> None:
    code = "%%mesh\ntry: input('more? ')\nexcept EOFError as error: print('no:', error)"
    cell = run_typing(kernel, code, ["\x04"])
    assert cell.ok and "[0-3] no: no answer to input()" in cell.plain, cell.plain


def test_a_notebook_without_a_person_gets_one_line(kernel: Kernel) -> None:
    for code, asks in ((NAME, "input()"), ("%%mesh\nimport getpass\ngetpass.getpass('key: ')", "getpass()")):
        cell = kernel.run(code)
        assert not cell.ok
        shown = cell.text() + "".join("\n".join(c["traceback"]) for kind, c in cell.messages if kind == "error")
        told, raised = [line for line in shown.replace("CallFailed", "\nCallFailed").splitlines() if line.strip()]
        words = f"ranks 0-3 raised PromptRefused: {asks} is not available on ranks here: this notebook runs without a"
        assert told.startswith(words) and raised.startswith(f"CallFailed: {words}"), shown


def test_a_job_that_asks_waits_for_the_prompt(kernel: Kernel) -> None:
    started = kernel.run("%%mesh --async\nanswer = input('go on? ')\nprint('said', answer)", is_attended=True)
    assert started.ok
    assert kernel.run("import time; time.sleep(2)").ok
    cell = run_typing(kernel, "%mesh pdb", ["yes"])
    assert cell.ok and cell.prompts == ["[0-3] go on? "], cell.plain
    assert kernel.run("%mesh wait").ok
    assert kernel.value("procs.evaluate('answer').get().values()") == "['yes', 'yes', 'yes', 'yes']"
