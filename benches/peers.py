"""Runs one peer on one model, or reports what all have measured. Called by peers.sh; figures are JSON lines with the
fields of `examples/tools/bench.rs --json`."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict

CLASSES = {"bf16": "16-bit", "f16": "16-bit", "q8_0": "8-bit", "int8": "8-bit", "q4_0": "4-bit", "q4_1": "4-bit", "int4": "4-bit"}
PREFILL = 512
DECODE = ((32, 128), (1024, 128))


def loads(text):
    for load in text.split(","):
        seqs, rest = load.split("x")
        prompt, generated = rest.split("+")
        yield int(seqs), int(prompt), int(generated)


def emit(args, scenario, metric, value):
    line = {"peer": args.peer, "model": args.model, "dtype": args.weights, "scen": scenario, "metric": metric}
    print(json.dumps({**line, "value": round(value, 4), "round": args.round, "ts": round(time.time())}), flush=True)


def run_llama(args):
    """llama.cpp and its fork: their own benches, one process a scenario."""
    file = f"{args.models}/{args.model}/{args.weights}.gguf"
    common = ["-m", file, "-t", str(args.threads), "-fa", "0"]
    is_ik = args.peer == "ik_llama.cpp"

    def lines(scenario, *command):
        """What a process printed as JSON lines; its peak memory is one more figure."""
        with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            out = child.stdout.read()
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command)
        emit(args, f"rss_{scenario}", "MiB", usage.ru_maxrss / 1024)
        return json.loads(out) if out.startswith("[") else [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def bench(scenario, *extra):
        extra = ["-rtr", 1, "-o", "json", *extra] if is_ik else ["-o", "jsonl", *extra]
        return lines(scenario, f"{args.bin}/llama-bench", *common, "-r", 1, *extra)[0]["avg_ts"]

    if "load" in args.what:
        start = time.perf_counter()
        bench("first_token_warm", "-p", 32, "-n", 0, *(["-w", 0] if is_ik else ["--no-warmup"]))
        emit(args, "first_token_warm", "s", time.perf_counter() - start)
    if "pp" in args.what:
        emit(args, f"pp{PREFILL}", "tok/s", bench(f"pp{PREFILL}", "-p", PREFILL, "-n", 0))
    if "tg" in args.what:
        for context, generated in DECODE:
            emit(args, f"tg@{context}", "tok/s", bench(f"tg@{context}", "-p", 0, "-n", *([0, "-gp", f"{context},{generated}"] if is_ik else [generated, "-d", context])))
    # The fork's batched bench has no output that a program could read.
    if "bg" in args.what and not is_ik:
        for seqs, prompt, generated in loads(args.batches):
            room = seqs * (prompt + generated + 8)
            command = [f"{args.bin}/llama-batched-bench", *common, "-c", room, "-npp", prompt, "-ntg", generated]
            command += ["-npl", seqs, "-b", 2048, "-ub", 512, "--output-format", "jsonl"]
            for figures in lines(f"bg{seqs}x{prompt}+{generated}", *command):
                emit(args, f"bg{seqs}x{prompt}+{generated}", "tok/s", figures["speed_tg"])
                emit(args, f"bgpp{seqs}x{prompt}", "tok/s", figures["speed_pp"])


def run_openvino(args):
    """OpenVINO GenAI's continuous batching, one process for all scenarios of a model."""
    import numpy
    import openvino
    import openvino_genai

    start = time.perf_counter()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 2048
    scheduler.cache_size = 3
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = False
    properties = {"INFERENCE_NUM_THREADS": args.threads, "ENABLE_CPU_PINNING": True}
    model = f"{args.models}/{args.model}/ov_{args.weights}"
    if not os.path.isdir(model):
        model = f"{args.models}/{args.model}/{args.weights}.gguf"
    pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    ids = iter(range(1, 1 << 30))

    def batch(seqs, prompt, generated):
        """Seconds until all have a first token, seconds after it, tokens in these."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = generated
        config.ignore_eos, config.do_sample = True, False
        handles = []
        for _ in range(seqs):
            number = next(ids)
            tokens = numpy.random.default_rng(number).integers(1000, 40000, size=(1, prompt), dtype=numpy.int64)
            handles.append(pipe.add_request(number, openvino.Tensor(tokens), config))
        got = [0] * seqs

        def read():
            for at, handle in enumerate(handles):
                while handle.can_read():
                    got[at] += sum(len(output.generated_ids) for output in handle.read().values())

        begin, first, in_prefill = time.perf_counter(), None, 0
        while pipe.has_non_finished_requests():
            pipe.step()
            if first is None:
                read()
                if all(got):
                    first, in_prefill = time.perf_counter(), sum(got)
        end = time.perf_counter()
        read()
        return first - begin, end - first, sum(got) - in_prefill

    batch(1, 32, 1)
    if "load" in args.what:
        emit(args, "first_token_warm", "s", time.perf_counter() - start)
    batch(1, 64, 4)
    if "pp" in args.what:
        emit(args, f"pp{PREFILL}", "tok/s", PREFILL / batch(1, PREFILL, 2)[0])
    if "tg" in args.what:
        for context, generated in DECODE:
            _, seconds, tokens = batch(1, context, generated + 1)
            emit(args, f"tg@{context}", "tok/s", tokens / seconds)
    if "bg" in args.what:
        for seqs, prompt, generated in loads(args.batches):
            prefill, seconds, tokens = batch(seqs, prompt, generated + 1)
            emit(args, f"bg{seqs}x{prompt}+{generated}", "tok/s", tokens / seconds)
            emit(args, f"bgpp{seqs}x{prompt}", "tok/s", seqs * prompt / prefill)
    # Its threads do not end by themselves.
    sys.stdout.flush()
    os._exit(0)


def report(path):
    """A table a model: our median of each class, the best peer's, and the ratio: more than 1 is better than they."""
    figures = defaultdict(list)
    with open(path) as lines:
        for line in map(json.loads, lines):
            precision = CLASSES.get(line["dtype"].lower())
            if precision:
                key = (line["model"], line["scen"], precision)
                figures[key, line["metric"], line["peer"], line["dtype"]].append(line["value"])
    medians = defaultdict(dict)
    for (key, metric, peer, dtype), values in figures.items():
        medians[key, metric][peer, dtype] = (statistics.median(values), len(values))
    print("| model | scenario | class | ours | best peer | ratio | runs |\n|---|---|---|---|---|---|---|")
    for (key, metric), by_peer in sorted(medians.items()):
        less = metric != "tok/s"
        pick = min if less else max
        ours = {who: value for who, value in by_peer.items() if who[0] == "ascend-llm"}
        peers = {who: value for who, value in by_peer.items() if who[0] != "ascend-llm"}
        if not ours or not peers:
            continue
        (_, our_dtype), (our, runs) = pick(ours.items(), key=lambda item: item[1][0])
        (peer, dtype), (best, _) = pick(peers.items(), key=lambda item: item[1][0])
        ratio = best / our if less else our / best
        model, scenario, precision = key
        print(f"| {model} | {scenario} | {precision} | {our:.4g} {metric} ({our_dtype}) | {best:.4g} ({peer} {dtype}) | {ratio:.2f} | {runs} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("peer", choices=["llama.cpp", "ik_llama.cpp", "openvino"])
    run.add_argument("model")
    run.add_argument("weights")
    run.add_argument("--bin", default="")
    run.add_argument("--models", required=True)
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--what", default="pp,tg,bg")
    run.add_argument("--batches", default="8x128+64")
    run.add_argument("--round", type=int, default=0)
    commands.add_parser("report").add_argument("results")
    args = parser.parse_args()
    if args.command == "report":
        report(args.results)
    elif args.peer == "openvino":
        run_openvino(args)
    else:
        run_llama(args)


main()
