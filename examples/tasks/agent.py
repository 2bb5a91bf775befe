"""Adds up what clients send, a line for each item: what, how many, what one costs."""

from contextlib import suppress
from decimal import Decimal

from ringfence import agent
from ringfence.agent import Conflict

LARGE = Decimal(10) ** 15


def total(text: str) -> Decimal:
    """The sum of all lines.

    Raises:
        ValueError: a line is none.
    """
    found = Decimal(0)
    for line in text.splitlines():
        try:
            _, count, price = line.rsplit(maxsplit=2)
            found += Decimal(count) * Decimal(price)
        except (ValueError, ArithmeticError):
            raise ValueError(line) from None
        # What clients send must end no program: neither `1e999999` nor `nan` is a price.
        if not abs(found) < LARGE:
            raise ValueError(line)
    return found


def answer(rf: agent.Ringfence, task: str, text: str) -> None:
    """Tells the client the total, or asks for what can be read.

    Raises:
        Conflict: the task has ended.
    """
    try:
        said = total(text)
    except ValueError as error:
        why = f"I can't read the line `{error}`: write what, how many, what one costs"
        rf.tasks.update(task, "input-required", why)
    else:
        rf.tasks.update(task, artifact="total", text=f"{said:.2f}")
        rf.tasks.update(task, "completed")


with agent.boot() as rf:
    while True:
        message = rf.messages.receive()
        if message is None or message.json.get("cancel"):
            continue
        task = message.json["task"]
        with suppress(Conflict):  # The client canceled it meanwhile: nobody waits for this any more.
            answer(rf, task, message.json["text"])
