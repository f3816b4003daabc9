#!/usr/bin/env python3
"""Interleaved CPU-per-request benchmark of tidegate beside other reverse proxies (see README.md).

Every proxy is pinned to one set of cores, the origin and the load generator to
another. Runs of all proxies are interleaved (order shuffled each round); for
every run the CPU time (user+system) of the proxy's whole process tree is read
from /proc and divided by the number of completed requests. The table shows
medians, and ratios that are paired per round with the baseline (median of the
per-round ratios, with a bootstrap 95 % interval).

Standard library only; needs python >= 3.11, taskset, a C compiler (for
loadgen.c), wrk and h2load (TLS scenarios), nginx (as the origin) and whichever
peers are asked for.
"""
import argparse, atexit, json, math, os, random, re, resource, shlex, shutil, signal
import socket, statistics, string, subprocess, sys, tempfile, time, tomllib, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
HZ = os.sysconf("SC_CLK_TCK")
MAX_DURATION = 10

# name -> (tool, needs tls, mode of the proxy, expected status class, path)
SCENARIOS = {
    "allow":      ("loop",   False, "allow", 2, "/"),  # closed loop, keep-alive HTTP/1.1, nothing limited
    "deny":       ("loop",   False, "deny",  4, "/"),  # same, every request answered 429 locally
    "keys":       ("keys",   False, "allow", 2, "/"),  # as allow, a new key in the header --key-header per request
    "one":        ("one",    False, "allow", 2, "/"),  # one connection: no batching, unloaded latency
    "one-deny":   ("one",    False, "deny",  4, "/"),
    "paced":      ("paced",  False, "allow", 2, "/"),  # open loop, Poisson arrivals at --rate (unsaturated proxy)
    "paced-deny": ("paced",  False, "deny",  4, "/"),
    "close":      ("close",  False, "allow", 2, "/"),  # one request per client connection (wrk)
    "allow-1k":   ("loop",   False, "allow", 2, "/1k"),    # bodies of 1 KiB and 100 KiB
    "allow-100k": ("loop",   False, "allow", 2, "/100k"),
    "tls1":       ("wrk",    True,  "allow", 2, "/"),  # TLS-terminated HTTP/1.1 keep-alive (wrk)
    "tls1-deny":  ("wrk",    True,  "deny",  4, "/"),
    "tls2":       ("h2",     True,  "allow", 2, "/"),  # TLS-terminated HTTP/2 (h2load)
    "tls2-deny":  ("h2",     True,  "deny",  4, "/"),
}

# Values of the limiter settings of the shipped peer templates.
MODES = {
    "allow": dict(NGINX_RATE="1000000r/s", NGINX_BURST="burst=1000000 nodelay",
                  HAPROXY_LIMIT="2000000000",
                  ENVOY_TOKENS="4000000000", ENVOY_FILL="4000000000", ENVOY_INTERVAL="1s",
                  RATE="10000000/s", BURST="10000000"),
    "deny": dict(NGINX_RATE="1r/m", NGINX_BURST="",
                 HAPROXY_LIMIT="0",
                 ENVOY_TOKENS="1", ENVOY_FILL="1", ENVOY_INTERVAL="3600s",
                 RATE="1/h", BURST="1"),
}

# `counted`: where the proxy counts its decisions; a run that the limit has not counted fails.
TIDEGATE = dict(cmd="${TIDEGATE} run --config ${CONF}", counted="http://127.0.0.1:${ADMIN_PORT}/metrics")
PEERS = {
    "tidegate":   dict(TIDEGATE, template="tidegate.toml"),
    "tidegate-1": dict(TIDEGATE, template="tidegate-1.toml"),
    "nginx":   dict(template="nginx.conf", cmd="nginx -c ${CONF}"),
    "haproxy": dict(template="haproxy.cfg", cmd="haproxy -db -f ${CONF}"),
    "caddy":   dict(template="Caddyfile", cmd="caddy run --config ${CONF} --adapter caddyfile", env=dict(HOME="${WORK}", GOMAXPROCS="${THREADS}"),
                    scenarios=["allow", "allow-1k", "allow-100k", "one", "paced", "close", "tls1", "tls2"]),
    "envoy":   dict(template="envoy.yaml",
                    cmd="${ENVOY} -c ${CONF} --concurrency ${THREADS} --base-id ${PORT} --disable-hot-restart -l error"),
}


# ---------------------------------------------------------------- processes

def tree(pid):
    """pid and all its descendants."""
    kids = {}
    for p in os.listdir("/proc"):
        if p.isdigit():
            try:
                with open(f"/proc/{p}/stat") as f:
                    ppid = int(f.read().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            kids.setdefault(ppid, []).append(int(p))
    out, todo = [], [pid]
    while todo:
        p = todo.pop()
        out.append(p)
        todo += kids.get(p, [])
    return out


def cpu_of(pid):
    """{thread: ns on a CPU} and (user, system) clock ticks of the tree."""
    run, u, s = {}, 0, 0
    for p in tree(pid):
        try:
            with open(f"/proc/{p}/stat") as f:
                w = f.read().rsplit(")", 1)[1].split()
            u += int(w[11])
            s += int(w[12])
            for t in os.listdir(f"/proc/{p}/task"):
                with open(f"/proc/{p}/task/{t}/schedstat") as f:
                    run[t] = int(f.read().split()[0])
        except OSError:
            continue
    return run, u / HZ, s / HZ


def cpu_diff(a, b):
    """(total, user, system) seconds between two cpu_of().

    The total comes from schedstat, which counts nanoseconds; where the kernel
    does not offer it, and when threads ended in between, from the 10 ms ticks.
    """
    u, s = b[1] - a[1], b[2] - a[2]
    if b[0] and a[0].keys() <= b[0].keys():
        return sum(v - a[0].get(k, 0) for k, v in b[0].items()) / 1e9, u, s
    return u + s, u, s


def rss_of(pid):
    """Proportional memory (PSS) of the tree in MiB."""
    kb = 0
    for p in tree(pid):
        try:
            with open(f"/proc/{p}/smaps_rollup") as f:
                for line in f:
                    if line.startswith("Pss:"):
                        kb += int(line.split()[1])
        except OSError:
            pass
    return kb / 1024


def cores(cpus):
    """(busy, stolen) seconds summed over a set of cores."""
    want = {f"cpu{c}" for c in cpus}
    busy = steal = 0
    with open("/proc/stat") as f:
        for line in f:
            w = line.split()
            if w[0] in want:
                v = [int(x) for x in w[1:9]]
                busy += v[0] + v[1] + v[2] + v[5] + v[6]
                steal += v[7]
    return busy / HZ, steal / HZ


def cpu_list(text):
    out = []
    for part in text.split(","):
        a, _, b = part.partition("-")
        out += range(int(a), int(b or a) + 1)
    return out


class Proc:
    """A child in its own process group, ended at exit by its own pid."""
    live = []

    def __init__(self, cmd, cpus, env=None, log=None):
        out = open(log, "ab") if log else subprocess.DEVNULL
        self.p = subprocess.Popen(["taskset", "-c", cpus] + cmd, stdout=out, stderr=out,
                                  stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})},
                                  start_new_session=True)
        self.pid = self.p.pid
        Proc.live.append(self)

    def stop(self):
        if self in Proc.live:
            Proc.live.remove(self)
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                break
            try:
                self.p.wait(3)
                break
            except subprocess.TimeoutExpired:
                pass


@atexit.register
def _cleanup():
    for p in list(Proc.live):
        p.stop()


def wait_port(port, proc, what, log, secs=15):
    end = time.time() + secs
    while time.time() < end:
        if proc.p.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), 0.3).close()
            return
        except OSError:
            time.sleep(0.05)
    tail = open(log).read()[-2000:] if log and os.path.exists(log) else ""
    sys.exit(f"{what}: not listening on {port}\n{tail}")


def decisions(url):
    """What the limiter has decided so far; its first limit is the one that is measured."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if line.startswith("tidegate_decisions_total{") and 'limit="global"' in line)


def subst(text, env):
    return string.Template(text).safe_substitute(env)


# ------------------------------------------------------------ load generators

UNIT = {"us": 1, "ms": 1e3, "s": 1e6, "m": 6e7}


def lat(text):
    m = re.match(r"([\d.]+)(us|ms|s|m)$", text)
    return float(m[1]) * UNIT[m[2]]


def run_wrk(a, url, extra=()):
    cmd = ["taskset", "-c", a.load_cpus, "wrk", "-t1", f"-c{a.conns}", f"-d{math.ceil(a.duration)}s",
           "--latency", *extra, url]
    o = subprocess.run(cmd, capture_output=True, text=True, timeout=a.duration + 30).stdout
    n = int(re.search(r"(\d+) requests in", o)[1])
    bad = int((re.search(r"Non-2xx or 3xx responses: (\d+)", o) or [0, 0])[1])
    err = re.search(r"Socket errors: (.*)", o)
    # with "Connection: close" wrk counts the orderly end of a connection as a read error
    return dict(n=n, ok=n - bad, rejected=bad, rps=float(re.search(r"Requests/sec:\s+([\d.]+)", o)[1]),
                p50=lat(re.search(r"^ +50% +(\S+)", o, re.M)[1]), p99=lat(re.search(r"^ +99% +(\S+)", o, re.M)[1]),
                err=err[1] if err else "")


def run_h2load(a, url, args, log=None):
    cmd = ["taskset", "-c", a.load_cpus, "h2load", "-t1", "-D", str(math.ceil(a.duration)), *args]
    if log:
        if os.path.exists(log):
            os.unlink(log)
        cmd += ["--log-file", log]
    o = subprocess.run(cmd + [url], capture_output=True, text=True, timeout=a.duration + 30).stdout
    m = re.search(r"requests: (\d+) total, (\d+) started, (\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored", o)
    st = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", o)
    if not m or not st:
        sys.exit("h2load said:\n" + o)
    n, ok, rej = int(m[3]), int(st[1]), int(st[3])
    r = dict(n=n, ok=ok, rejected=rej, rps=n / math.ceil(a.duration), p50=float("nan"), p99=float("nan"),
             err="" if int(m[6]) == 0 else f"errored {m[6]}")
    if log and os.path.exists(log):
        v = sorted(int(line.split("\t")[2]) for line in open(log) if line.count("\t") >= 2)
        os.unlink(log)
        if v:
            r.update(p50=v[len(v) // 2], p99=v[int(len(v) * .99)])
    return r


def run_loadgen(a, url, *args):
    m = re.match(r"http://([\d.]+):(\d+)(/.*)$", url)
    cmd = ["taskset", "-c", a.load_cpus, a.loadgen, "-d", str(a.duration), *args, *m.groups()]
    o = subprocess.run(cmd, capture_output=True, text=True, timeout=a.duration + 30)
    if o.returncode:
        sys.exit("loadgen: " + o.stderr)
    r = json.loads(o.stdout)
    r["err"] = f"errors {r['errors']}" if r["errors"] else ""
    if r["backlog"] > 1000:
        r["err"] += f" overloaded: {r['backlog']} requests left waiting"
    return r


def load(a, tool, url):
    if tool == "loop":
        return run_loadgen(a, url, f"-c{a.conns}")
    if tool == "keys":
        return run_loadgen(a, url, f"-c{a.conns}", "-k", f"{a.key_header}:{a.keys}")
    if tool == "one":
        return run_loadgen(a, url, "-c1")
    if tool == "paced":
        return run_loadgen(a, url, f"-c{a.conns}", "-r", str(a.rate))
    if tool == "wrk":
        return run_wrk(a, url)
    if tool == "close":
        return run_wrk(a, url, ("-H", "Connection: close"))
    if tool == "h2":
        return run_h2load(a, url, [f"-c{a.h2_conns}", f"-m{a.h2_streams}"], os.path.join(a.work, "h2load.log"))
    raise ValueError(tool)


# ------------------------------------------------------------------- main

def proxies(a):
    """name -> spec from --peers, --suite and --proxy."""
    out = {}
    for n in filter(None, a.peers.split(",")):
        out[n] = dict(PEERS[n], dir=os.path.join(HERE, "conf"))
    for path in a.suite:
        with open(path, "rb") as f:
            d = tomllib.load(f)
        for n, s in d.get("proxy", {}).items():
            out[n] = dict(s, dir=os.path.dirname(os.path.abspath(path)))
    for text in a.proxy:
        n, _, cmd = text.partition("=")
        out[n] = dict(cmd=cmd, dir=os.getcwd())
    for text in a.url:
        n, _, u = text.partition("=")
        out[n]["url"] = u
    return {n: s for n, s in out.items() if not a.only or re.search(a.only, n)}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("-s", "--scenarios", default="allow,deny", help=",".join(SCENARIOS))
    ap.add_argument("--peers", default="tidegate,tidegate-1,nginx,haproxy,envoy,caddy", help=",".join(PEERS))
    ap.add_argument("--tidegate", default=HERE + "/../target/release/tidegate", help="path of the tidegate binary")
    ap.add_argument("--results", help="write a report with machine, versions, command and commit to this file")
    ap.add_argument("--proxy", action="append", default=[], metavar="NAME=CMD",
                    help="any other proxy: command line, ${VARIABLES} as in the README")
    ap.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="its URL if not http://127.0.0.1:${PORT}/")
    ap.add_argument("--suite", action="append", default=[], help="TOML file with more proxies")
    ap.add_argument("--direct", action="store_true", help="also measure the origin without a proxy")
    ap.add_argument("--only", help="regular expression on proxy names")
    ap.add_argument("--baseline", default="nginx", help="name the ratios refer to")
    ap.add_argument("--runs", type=int, default=7, help="many short runs resist a noisy machine better than few long ones")
    ap.add_argument("--duration", type=float, default=2, help=f"seconds per run, at most {MAX_DURATION} (wrk and h2load: whole seconds)")
    ap.add_argument("--conns", type=int, default=64)
    ap.add_argument("--h2-conns", type=int, default=8)
    ap.add_argument("--h2-streams", type=int, default=32)
    ap.add_argument("--rate", type=float, default=8000, help="req/s of the paced scenarios")
    ap.add_argument("--keys", type=int, default=1000000, help="number of distinct keys of the keys scenario")
    ap.add_argument("--key-header", default="X-Api-Key")
    ap.add_argument("--seed", type=int, help="of the shuffling")
    ap.add_argument("--body", type=int, default=200, help="bytes of the origin's body")
    ap.add_argument("--proxy-cpus", default="0")
    ap.add_argument("--load-cpus", default="1")
    ap.add_argument("--port-base", type=int, default=21000)
    ap.add_argument("--envoy", default=shutil.which("envoy") or "envoy", help="path of the envoy binary")
    ap.add_argument("--cert", help="PEM certificate (default: a throw-away P-256 one is made)")
    ap.add_argument("--key")
    ap.add_argument("--netns", action="store_true",
                    help="run in a private network namespace (root): own loopback, no netfilter rules, reno; closer to a bare TCP stack")
    ap.add_argument("--work", help="scratch directory (default: a temporary one)")
    ap.add_argument("--json", help="write every single run to this file")
    ap.add_argument("--max-foreign", type=float, default=0.05,
                    help="redo a run (twice at most) when others used more than this share of the proxy's core")
    a = ap.parse_args()
    if a.netns and "BENCH_IN_NETNS" not in os.environ:
        os.environ["BENCH_IN_NETNS"] = "1"
        os.execvp("unshare", ["unshare", "-n", "sh", "-c",
                              "ip link set lo up && echo reno > /proc/sys/net/ipv4/tcp_congestion_control; exec \"$@\"",
                              "sh", sys.executable, *sys.argv])
    a.duration = min(a.duration, MAX_DURATION)
    a.work = a.work or tempfile.mkdtemp(prefix="bench.")
    os.makedirs(a.work, exist_ok=True)
    random.seed(a.seed)
    a.loadgen = a.work + "/loadgen"
    subprocess.run(["cc", "-O2", "-o", a.loadgen, HERE + "/loadgen.c", "-lm"], check=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if not a.cert:
        a.cert, a.key = a.work + "/bench.crt", a.work + "/bench.key"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-keyout", a.key, "-out", a.cert, "-days", "30", "-subj", "/CN=localhost"],
                       check=True, capture_output=True)
    pem = a.work + "/bench.pem"
    with open(pem, "w") as f:
        f.write(open(a.cert).read() + open(a.key).read())

    base = dict(ORIGIN_PORT=str(a.port_base + 1), ORIGIN=f"127.0.0.1:{a.port_base + 1}", WORK=a.work, CERT=a.cert, KEY=a.key,
                CERT_PEM=pem, ENVOY=a.envoy, TIDEGATE=a.tidegate, BODY="x" * a.body, THREADS=str(len(cpu_list(a.proxy_cpus))))
    for name, size in (("1k", 1024), ("100k", 102400)):
        with open(f"{a.work}/{name}", "w") as f:
            f.write("x" * size)
    conf = a.work + "/origin.conf"
    with open(conf, "w") as f:
        f.write(subst(open(HERE + "/conf/origin-nginx.conf").read(), {**base, "PORT": base["ORIGIN_PORT"]}))
    origin = Proc(["nginx", "-c", conf], a.load_cpus, log=a.work + "/origin.log")
    wait_port(a.port_base + 1, origin, "origin", a.work + "/origin.log")

    scen = a.scenarios.split(",")
    specs, inst, port = proxies(a), {}, a.port_base + 10
    for name, s in specs.items():
        for mode in sorted({SCENARIOS[x][2] for x in scen if x in s.get("scenarios", scen)}):
            env = {**base, **MODES[mode], "PORT": str(port), "TLS_PORT": str(port + 1), "ADMIN_PORT": str(port + 2), "MODE": mode}
            env["WORK"] = f"{a.work}/{name}-{mode}"
            os.makedirs(env["WORK"], exist_ok=True)
            for k, v in s.get(mode, {}).items():          # per-mode variables of a suite
                env[k] = subst(str(v), env)
            if "template" in s:
                env["CONF"] = f"{env['WORK']}/{os.path.basename(s['template'])}"
                with open(os.path.join(s["dir"], s["template"])) as f, open(env["CONF"], "w") as g:
                    g.write(subst(f.read(), env))
            cmd = s["cmd"] if isinstance(s["cmd"], list) else shlex.split(s["cmd"])
            log = env["WORK"] + "/log"
            p = Proc([subst(c, env) for c in cmd], a.proxy_cpus, {k: subst(str(v), env) for k, v in s.get("env", {}).items()}, log)
            first = int(s.get("wait_port", port)) if "wait_port" in s else (port + 1 if s.get("tls_only") else port)
            wait_port(first, p, f"{name} ({mode})", log)
            inst[name, mode] = (p, env, s)
            port += 10
    if a.direct:
        specs["direct"] = dict(url=f"http://127.0.0.1:{base['ORIGIN_PORT']}", scenarios=["allow", "one", "paced", "close"])
        inst["direct", "allow"] = (origin, base, specs["direct"])
    time.sleep(0.5)

    pc = cpu_list(a.proxy_cpus)
    lc = cpu_list(a.load_cpus)
    rows = []
    for rnd in range(a.runs):
        for sc in scen:
            tool, tls, mode, want, path = SCENARIOS[sc]
            names = [n for n in specs if sc in specs[n].get("scenarios", scen)]
            random.shuffle(names)
            for n in names:
                p, env, s = inst[n, mode]
                url = subst(s.get("tls_url" if tls else "url",
                                  "https://127.0.0.1:${TLS_PORT}" if tls else "http://127.0.0.1:${PORT}"), env)
                url = url.rstrip("/") + path
                counted = subst(s.get("counted", ""), env)
                for attempt in range(3):
                    c0, b0, l0, o0, t0 = cpu_of(p.pid), cores(pc), cores(lc), cpu_of(origin.pid), time.time()
                    d0 = decisions(counted) if counted else 0
                    r = load(a, tool, url)
                    t1 = time.time()
                    c1, b1, l1, o1 = cpu_of(p.pid), cores(pc), cores(lc), cpu_of(origin.pid)
                    cpu, user, syst = cpu_diff(c0, c1)
                    wall = t1 - t0
                    foreign = max(0.0, (b1[0] - b0[0] - cpu) / wall / len(pc))
                    if foreign <= a.max_foreign or attempt == 2:
                        break
                good = r["ok"] if want == 2 else r["rejected"]
                r.update(proxy=n, scenario=sc, round=rnd, us=cpu / r["n"] * 1e6, user=user / r["n"] * 1e6,
                         sys=syst / r["n"] * 1e6, util=cpu / wall, load=(l1[0] - l0[0]) / wall / len(lc),
                         origin=cpu_diff(o0, o1)[0] / r["n"] * 1e6, foreign=foreign,
                         steal=(b1[1] - b0[1]) / wall / len(pc), good=good / max(1, r["n"]), rss=rss_of(p.pid))
                if counted and decisions(counted) - d0 < r["n"]:
                    r["err"] += f" the limit counted {decisions(counted) - d0:.0f} of {r['n']} requests"
                if r["good"] < 0.99:
                    r["err"] += f" only {r['good']:.1%} had the expected status"
                rows.append(r)
                print(f"{rnd} {sc:10} {n:24} {r['us']:7.2f} us/req  {r['rps']:9.0f} req/s  p99 {r['p99']:8.0f} us"
                      f"  foreign {foreign:4.0%} {r['err']}", file=sys.stderr, flush=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)

    text = report(a, scen, rows)
    print(text)
    if a.results:
        with open(a.results, "w") as f:
            f.write(heading(a, specs) + text)
    if any(r["err"] for r in rows):
        sys.exit("some runs are not valid: see (!)")


def ratio(mine, ref):
    """Median of the per-round ratios and its bootstrap 95 % interval."""
    v = [r["us"] / ref[r["round"]] for r in mine if r["round"] in ref]
    if not v:
        return float("nan"), float("nan"), float("nan")
    boot = sorted(statistics.median(random.choices(v, k=len(v))) for _ in range(1000))
    return statistics.median(v), boot[25], boot[975]


def said(command):
    """First line of what a command says, or nothing where it does not exist."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip().split("\n")[0]


def heading(a, specs):
    """Machine, versions, command and commit."""
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    versions = [said(f"{a.tidegate} --version"), said("nginx -v"), said("haproxy -v"), said(f"{a.envoy} --version"), "caddy " + said("caddy version")]
    commit = said(f"git -C {HERE} describe --always --dirty")
    return ("# Results\n\nCPU time (user and system) of the proxy for each completed request, one core each, beside its peers in the same run. "
            "Absolute times hold for this machine on this day; the ratios are what to compare.\n\n"
            f"- machine: {model}, {os.cpu_count()} cores, Linux {os.uname().release}\n"
            f"- versions: {'; '.join(v for v in versions if v)}\n- commit: {commit}, {time.strftime('%Y-%m-%d')}\n"
            f"- command: `bench/bench.py {' '.join(shlex.quote(x) for x in sys.argv[1:])}`\n"
            "- `tidegate` has three limits (global, per address, per user), both header families, metrics and request ids on; `tidegate-1` has one limit; "
            "the peers have one; caddy has none (its limiter is not in the distribution's build).\n")


def report(a, scen, rows):
    out = []
    for sc in scen:
        rs = [r for r in rows if r["scenario"] == sc]
        ref = {r["round"]: r["us"] for r in rs if r["proxy"] == a.baseline}

        def med(n, k):
            return statistics.median(r[k] for r in rs if r["proxy"] == n)

        out.append(f"\n## {sc}  (median of {a.runs} runs of {a.duration:g} s; ratio: paired per round with {a.baseline})\n")
        out.append("| proxy | ratio | 95 % | CPU us/req | min | user share | req/s | p50 us | p99 us | core use | load core | PSS MiB |")
        out.append("|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
        for n in sorted({r["proxy"] for r in rs}, key=lambda n: ratio([r for r in rs if r["proxy"] == n], ref)[0] if ref else med(n, "us")):
            mine = [r for r in rs if r["proxy"] == n]
            q, lo, hi = ratio(mine, ref)
            u, s = sum(r["user"] * r["n"] for r in mine), sum(r["sys"] * r["n"] for r in mine)
            note = " (!)" if any(r["err"] for r in mine) and sc != "close" else ""
            out.append(f"| {n}{note} | {q:.3f} | {lo:.3f}..{hi:.3f} | {med(n, 'us'):.2f} | {min(r['us'] for r in mine):.2f} | "
                       f"{u / max(1, u + s):.0%} | {med(n, 'rps'):.0f} | {med(n, 'p50'):.0f} | {med(n, 'p99'):.0f} | "
                       f"{med(n, 'util'):.0%} | {med(n, 'load'):.0%} | {med(n, 'rss'):.1f} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    main()
