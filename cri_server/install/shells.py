"""Completion scripts for bash, zsh and fish. pyrunc has its own script for bash and its own end of
the script for zsh; click generates the rest.

A script calls the executable whose command line it completes: the executable knows its commands
and, for some arguments, the existing objects.
"""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

# Differs from click's script in the treatment of colons, which occur in image names: bash splits
# words at them (COMP_WORDBREAKS), and inserts a candidate after the last one.
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
    for item in $(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) \\
            %(complete_var)s=bash_complete "$1"); do
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
# At the first completion zsh runs the whole file as the completion function (autoload). click's
# script then only registers the real function, and the first completion has no results.
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
# The completions of a program, below a prefix. Debian's zsh has a folder for packages.
PATHS = {
    "bash": "share/bash-completion/completions/{name}",
    "zsh": "share/zsh/{site}/_{name}",
    "fish": "share/fish/vendor_completions.d/{name}.fish",
}


def script(shell: str, name: str, program: click.Command) -> str:
    """Return the completion script of the executable `name` for `shell`, a key of CLASSES.
    `program`: its click command. The script can be installed as a file or passed to the shell's
    `eval`."""
    completion = CLASSES[shell](program, {}, name, variable(name))
    template = completion.source_template
    if shell == "bash":
        template = BASH
    elif shell == "zsh":
        template = template.partition("if [[ $zsh_eval_context")[0] + ZSH_END
    return (template % completion.source_vars()).lstrip()


def variable(name: str) -> str:
    """Return the environment variable that makes the executable `name` print completions."""
    # click looks for this name (its documentation, "Shell Completion").
    return f"_{name.upper().replace('-', '_')}_COMPLETE"


def path(shell: str, name: str, prefix: str) -> str:
    """Return the path below `prefix` where `shell` looks for the completion script of the
    executable `name`. For zsh the path depends on the prefix: packages (/usr) use another folder on
    Debian."""
    site = "vendor-completions" if prefix == "/usr" else "site-functions"
    return f"{prefix}/{PATHS[shell].format(name=name, site=site)}"
