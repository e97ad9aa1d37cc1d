"""The Jupyter project's own conformance suite; everything that stock ipykernel passes must pass here."""

from __future__ import annotations

import jupyter_kernel_test
import pytest
from ipykernel._version import version_info

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("installed_kernelspec")]


class TestConformance(jupyter_kernel_test.KernelTests):
    kernel_name = "meshbook"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('to stderr', file=sys.stderr)"
    code_page_something = "zip?"
    code_generate_error = "raise ValueError"
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")  # stock ipykernel fails "range" too
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples = ["import = 7q"]
    completion_samples = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "import sys; sys.setswitchin", "matches": {"setswitchinterval"}},
    ]
    code_execute_result = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data = [
        {
            "code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))",
            "mime": "text/html",
        },
        {"code": "from IPython.display import Math, display; display(Math('1/2'))", "mime": "text/latex"},
    ]


class TestIopubWelcome(jupyter_kernel_test.IopubWelcomeTests):
    kernel_name = "meshbook"
    support_iopub_welcome = version_info >= (7, 3)
