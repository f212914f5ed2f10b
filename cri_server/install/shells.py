"""The completion of a program in bash, zsh and fish: click's scripts, with one of our own for bash
and another end for zsh's.

They ask the program, which knows its commands and, for some arguments, what there is.
"""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

# As click's, but for colons, which names of images have: bash takes words apart there
# (COMP_WORDBREAKS), and puts what is offered behind the last of them.
BASH = """\
%(complete_func)s() {
    local word item type value colons="" rest="$COMP_LINE" words=()
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        if [[ -z $COMP_LINE || ${#words[@]} -eq 0 || $rest == [[:blank:]]* ]]; then
            words+=("$word")
        else
            words[${#words[@]}-1]+="$word"
        fi
        rest="${rest#"${rest%%%%[![:blank:]]*}"}"
        rest="${rest#"$word"}"
    done
    word="${words[${#words[@]}-1]}"
    if [[ $word == *:* && $COMP_WORDBREAKS == *:* ]]; then
        colons="${word%%"${word##*:}"}"
    fi
    local IFS=$'\\n'
    for item in $(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1"); do
        IFS=',' read -r type value <<< "$item"
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $type == plain ]]; then
            COMPREPLY+=("${value#"$colons"}")
        fi
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
# zsh calls a file of its path with what is to be completed the first time, and keeps its text as
# the function of that name. There click's registers the inner function only when it is called
# again, and then completes nothing.
ZSH_END = """\
compdef %(complete_func)s %(prog_name)s
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
fi
"""
CLASSES: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}
# Where each shell looks for completions of a program below a prefix. Debian's zsh has a folder for
# packages.
PATHS = {
    "bash": "share/bash-completion/completions/{name}",
    "zsh": "share/zsh/{site}/_{name}",
    "fish": "share/fish/vendor_completions.d/{name}.fish",
}


def script(shell: str, name: str, program: click.Command) -> str:
    """What `shell` (a key of CLASSES) reads, as a file or by eval."""
    made = CLASSES[shell](program, {}, name, variable(name))
    template = made.source_template
    if shell == "bash":
        template = BASH
    elif shell == "zsh":
        template = template.partition("if [[ $zsh_eval_context")[0] + ZSH_END
    return (template % made.source_vars()).lstrip()


def variable(name: str) -> str:
    """The environment variable by which a script asks the program."""
    return f"_{name.upper().replace('-', '_')}_COMPLETE"


def path(shell: str, name: str, prefix: str) -> str:
    """The script's file below `prefix`; /usr is the packages'."""
    site = "vendor-completions" if prefix == "/usr" else "site-functions"
    return f"{prefix}/{PATHS[shell].format(name=name, site=site)}"
