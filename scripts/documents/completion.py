"""Shell completion of commands and options, by click's own functions, which ask the program."""

from __future__ import annotations

from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from documents.commands import programs

# Where a shell looks for them below /usr/share on Debian, by the name of the program.
PLACES: dict[type[ShellComplete], str] = {
    BashComplete: "bash-completion/completions/{}",
    ZshComplete: "zsh/vendor-completions/_{}",
    FishComplete: "fish/vendor_completions.d/{}.fish",
}


def completion() -> dict[str, str]:
    """The text of each file, by its path below /usr/share."""
    return {
        place.format(context.info_name): ShellComplete.source(shell(context.command, {}, name, variable(name)))
        for context in programs()
        for shell, place in PLACES.items()
        if (name := str(context.info_name))
    }


def variable(program: str) -> str:
    """The variable of the environment that asks a program for completions."""
    return f"_{program.upper().replace('-', '_')}_COMPLETE"
