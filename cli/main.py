"""The `sagegen` command: a group whose commands are imported only when they run."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import IO, Any

import click

from sagegen.errors import SagegenError
from sagegen.interrupts import PromptInterrupts

#: What `sagegen --help` says of each command, so that it imports none of them.
COMMANDS = {
    "gpus": "List the known GPUs and those of this machine.",
    "doctor": "Check what running and building kernels needs on this machine.",
    "show": "Show the tuned registry, an entry, a difference, or the search space.",
    "report": "Write a journal or a registry as one page that works offline.",
    "render": "Print the CUDA source of a config.",
    "build": "Compile a config and print what it takes.",
    "tune": "Search the best configs for a GPU and write its registry.",
    "pack": "Pack registries with their cubins: folder, archive or wheel.",
    "unpack": "Check an archive of registries and unpack it.",
    "merge": "Merge several registries of one GPU into one.",
    "gc": "Remove compiled kernels that nobody needs from the cache folder.",
    "verify": "Check tuned kernels against exact attention: this GPU or the emulator.",
    "ablate": "Compare the papers' techniques and number types by accuracy, each switched alone.",
    "bench": "Time tuned kernels against torch SDPA on this GPU.",
    "probe": "Measure what the units of this GPU reach.",
    "model": "Hold the model of absent GPUs to what a journal measured.",
}


class MisuseError(click.ClickException):
    """A SagegenError as click shows it: one message on stderr, exit code 2."""

    exit_code = 2

    def __init__(self, error: SagegenError) -> None:
        super().__init__(error.message)
        self.remedy = error.remedy

    def show(self, file: IO[Any] | None = None) -> None:
        super().show(file)
        if self.remedy:
            click.echo(f"Remedy: {self.remedy}", file=file, err=True)


class LazyGroup(click.Group):
    """A group of the COMMANDS: command NAME is `command` of the module sagegen.cli.NAME."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"sagegen.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        interrupts = PromptInterrupts()
        try:
            with interrupts:
                done = self._invoke(ctx, interrupts)
            if interrupts.arrived:  # and a library swallowed the exception: whoever sent it must not take this for done
                raise KeyboardInterrupt
            return done
        except SagegenError as error:
            raise MisuseError(error) from error
        except KeyboardInterrupt as error:  # before a command had anything to keep
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(130) from error  # what shells report for Ctrl+C
        except BrokenPipeError:  # a reader like `head` has enough: click ends quietly
            raise
        except OSError as error:  # a path that cannot be read or written, a full disk: the machine's, not ours
            raise MisuseError(_describe_os_error(error)) from error

    def _invoke(self, ctx: click.Context, interrupts: PromptInterrupts) -> Any:
        """Run the command. One that ends by an error of its own after it was interrupted was interrupted."""
        try:
            return super().invoke(ctx)
        except (SagegenError, click.ClickException, OSError) as error:
            if interrupts.arrived:
                raise KeyboardInterrupt from error
            raise


def _describe_os_error(error: OSError) -> SagegenError:
    where = f"{error.filename}: " if error.filename else ""
    return SagegenError(
        f"{where}{error.strerror or error}", "check the path, its permissions and the free space of its disk"
    )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("sagegen"), prog_name="sagegen")
def main() -> None:
    """Generate, tune and ship quantized attention kernels.

    Exit codes: 0 done, 1 found wrong, 2 misuse.

    \b
    Example: tune for the GPU of this machine, then look at the result
      sagegen tune --gpu h200
      sagegen show --gpu h200
    """
