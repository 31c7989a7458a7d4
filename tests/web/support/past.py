# Writes a past into a history that a server has made: three starts with phases, steps of the ladder, requests of known figures and smoke
# runs. Called with the database's path; prints what it wrote as JSON, for the tests to compare with.
import json, random, sqlite3, sys, time

random.seed(11)
db = sqlite3.connect(sys.argv[1])
now = int(time.time() * 1000)
hour = 3600 * 1000

# The start that made the file is no part of this past.
for table in ["service_run", "service_phase", "smoke_check", "smoke_run", "event"]:
    db.execute(f"DELETE FROM {table}")


def insert(table, **row):
    columns = {r[1]: r[2] for r in db.execute(f"PRAGMA table_info({table})") if r[1] != "id"}
    full = {name: row.pop(name, "" if kind == "TEXT" else 0) for name, kind in columns.items()}
    assert not row, row
    names = ", ".join(full)
    return db.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(full))})", list(full.values())).lastrowid


def run(started, ended, version, mode, flags, reason, code, phases, pages):
    run_id = insert("service_run", version=version, host="gpu-03", model="tiny", drafter="embedded:tiny/draft", mode=mode, devices=json.dumps({"backend": "cpu", "cores": 2}), flags=json.dumps(flags),
                    plan=json.dumps({"context_length": 2048, "kv_pages": pages}), pid=4000, started_ms=started, ready_ms=started + 4000 if code == 0 else 0, heartbeat_ms=ended, ended_ms=ended, end_reason=reason, exit_code=code, smoke="pass" if code == 0 else "")
    at = started
    for name, ms, why in phases:
        insert("service_phase", run_id=run_id, at_ms=at, phase=name, reason=why)
        at += ms
    return run_id


start = [("starting", 100, ""), ("devices", 200, ""), ("weights", 1500, ""), ("graphs", 700, ""), ("smoke", 1500, "")]
first = run(now - 30 * hour, now - 20 * hour, "0.0.9", "DFLASH", {"--port": "30000", "--speculative-algorithm": "DFLASH"}, "asked to stop", 0, start + [("ready", 10 * hour - 6000, ""), ("draining", 2000, ""), ("stopped", 0, "asked to stop")], 256)
broken = run(now - 19 * hour, now - 19 * hour + 1800, "0.1.0", "DDTREE", {"--port": "30000"}, "failed: tensor fc.weight is [64, 192], expected [64, 256]", 65, start[:3] + [("failed", 0, "tensor fc.weight is [64, 192], expected [64, 256]")], 0)
second = run(now - 18 * hour, now - 2 * hour, "0.1.0", "DDTREE", {"--port": "30000", "--speculative-algorithm": "DDTREE", "--store-text": ""}, "asked to stop", 0,
             start + [("ready", 6 * hour, ""), ("degraded", 2 * hour, "the canary was answered otherwise than at the start"), ("ready", 8 * hour - 6000, ""), ("draining", 2000, ""), ("stopped", 0, "asked to stop")], 512)
ladder = [(5.5, "DDTREE", "reset", "down", "fault.acceptance"), (5.8, "reset", "DFLASH", "down", "fault.acceptance"), (6.0, "DFLASH", "NONE", "down", "fault.wrong-text"), (6.1, "NONE", "degraded", "down", "fault.canary"),
          (8.0, "degraded", "NONE", "up", None), (9.0, "NONE", "DFLASH", "up", None), (11.0, "DFLASH", "DDTREE", "up", None)]
for hours, before, after, direction, fault in ladder:
    at = int(now - 18 * hour + hours * hour)
    if fault:
        insert("event", run_id=second, at_ms=at - 500, severity=2, kind=fault, message=f"found at {hours} h")
    insert("event", run_id=second, at_ms=at, severity=1 if fault else 0, kind="ladder", message=f"{before} to {after}", detail=json.dumps({"from": before, "to": after, "direction": direction, "fault": fault, "reason": "r"}))
insert("event", run_id=second, at_ms=now - 3 * hour, severity=0, kind="speculation.fallback", message="no mark for this one")

requests = []
for i in range(300):
    of_first = i % 3 == 0
    mode = "DFLASH" if of_first else random.choice(["DDTREE", "DDTREE", "NONE"])
    rounds = random.randint(5, 60)
    at_position, left = [], rounds
    while mode != "NONE" and left > 0 and len(at_position) < 15:
        left = int(left * random.uniform(0.6, 0.95))
        at_position.append(left)
    tokens = sum(at_position) + rounds + 1
    decode = tokens * random.uniform(2, 9)
    r = dict(run_id=first if of_first else second, request_id=f"chatcmpl-past{i:04d}", endpoint="/v1/chat/completions", client=random.choice(["openai-python", "curl"]), model="tiny", received_ms=now - (29 if of_first else 17) * hour + i * 60000,
             finished_ms=now - (29 if of_first else 17) * hour + i * 60000 + int(decode), thinking=random.choice([1, 0]), http_status=200, finish="stop", mode=mode, prompt_tokens=random.choice([40, 300, 900, 3000, 12000]), completion_tokens=tokens,
             rounds=rounds, drafted=rounds * 15, accepted=sum(at_position), nodes_verified=rounds * 15, accepted_at=json.dumps(at_position, separators=(",", ":")), histogram="[]", queue_ms=0.1, prefill_ms=20, decode_ms=decode,
             first_token_ms=random.uniform(5, 400), total_ms=decode + 50, tokens_per_second=(tokens - 1) * 1000 / decode)
    insert("request", **r)
    requests.append(r)

smokes = []
for run_id, ago, verdict, speed, text in [(first, 30 * hour, "pass", 540, "def gcd(a, b):\n    return a"), (second, 18 * hour, "fail", 612, "def gcd(a, b):\n    while b: a, b = b, a % b\n    return a")]:
    smoke = insert("smoke_run", run_id=run_id, started_ms=now - ago, finished_ms=now - ago + 1500, started_by="start", verdict=verdict, version="0.1.0", model="tiny", tokens_per_second=speed, acceptance=6.2, message="" if verdict == "pass" else "equals-plain failed for DDTREE")
    insert("smoke_check", smoke_id=smoke, position=0, name="coherent", mode="NONE", verdict="pass", input_id="gcd", output=text, figure=118, unit="tokens/s", ms=400)
    insert("smoke_check", smoke_id=smoke, position=1, name="equals-plain", mode="DDTREE", verdict=verdict, input_id="gcd", output="same", figure=7, unit="tokens a round", ms=80, message="" if verdict == "pass" else "token 14 is 498 with speculation and 276 without")
    smokes.append(smoke)
skipped = insert("smoke_run", run_id=second, started_ms=now - 17 * hour, finished_ms=now - 17 * hour, started_by="dashboard", verdict="skipped", version="0.1.0", model="tiny", message="the engine is busy")
db.commit()
print(json.dumps({"first": first, "broken": broken, "second": second, "smokes": smokes, "skipped": skipped, "requests": requests}))
