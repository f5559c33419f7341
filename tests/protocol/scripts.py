"""The scripts of splitspec/registry/*.lua, each atomic, each named as its file."""

from __future__ import annotations

from typing import Any

from tests.protocol.values import Call, Record, Rules

#: A script's reply: "ok", or why it was refused.
Reply = tuple[str, Record]


def run_script(rules: Rules, record: Record, call: Call) -> Reply:
    script: Any = _SCRIPTS[call.script]
    return script(rules, record, call)  # type: ignore[no-any-return]


def open_session(rules: Rules, record: Record, call: Call) -> Reply:
    """A new owner under the next epoch, unless another owner's lease runs."""
    if record.leased and record.owner != call.request:
        return "busy", record
    opened = record._replace(exists=True, epoch=record.epoch + 1, owner=call.request, leased=True)
    return "ok", opened


def append(rules: Rules, record: Record, call: Call) -> Reply:
    """Tokens where the journal ends, with the last round; a repeated call finds its own tokens there."""
    if rules.append_checks_epoch and _refused(record, call):
        return "stale", record
    offset, tokens, round_number = call.args
    assert isinstance(offset, int)
    assert isinstance(tokens, tuple)
    assert isinstance(round_number, int)
    if offset == len(record.journal) or not rules.append_checks_offset:
        record = record._replace(journal=(*record.journal, *tokens))
    elif record.journal[offset : offset + len(tokens)] != tokens:
        return "out_of_sync", record
    last_round = max(record.round, round_number) if rules.round_journaled else record.round
    return "ok", record._replace(leased=record.owner is not None, round=last_round)


def save(rules: Rules, record: Record, call: Call) -> Reply:
    """What the session's next request needs."""
    if _refused(record, call):
        return "stale", record
    target, draft, revision, round_number = call.args
    fields: Any = {"target": target, "draft": draft, "revision": revision, "round": round_number}
    return "ok", record._replace(leased=True, **fields)


def end_session(rules: Rules, record: Record, call: Call) -> Reply:
    """Ownership given up; record and journal are kept."""
    if not record.exists or record.epoch != call.epoch:
        return "stale", record
    return "ok", record._replace(owner=None, leased=False)


def delete_session(rules: Rules, record: Record) -> Record:
    """CloseSession of a client: record and journal are gone."""
    kept_epoch = record.epoch if rules.epoch_outlives_record else 0
    return Record(life=record.life + 1, epoch=kept_epoch)


def _refused(record: Record, call: Call) -> bool:
    return not record.exists or record.epoch != call.epoch or record.owner is None


_SCRIPTS = {"open_session": open_session, "append": append, "save": save, "end_session": end_session}
