//! `tidegate top`: shows the current load and the most rejected keys, until Ctrl-C.

use std::{
    fmt::Write as _,
    io::{IsTerminal as _, Write as _},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{admin::AdminAddress, terminal::printable};

/// Arguments of `tidegate top`.
#[derive(Debug, clap::Args)]
pub struct TopArgs {
    #[command(flatten)]
    gateway: AdminAddress,
    /// Print once and exit; the default if the output is not a terminal
    #[arg(long)]
    once: bool,
}

/// Time between two samples.
const PAUSE: Duration = Duration::from_secs(1);
/// How many keys are listed.
const KEYS: usize = 10;
/// Moves the cursor to the upper left and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[J";

#[expect(
    clippy::disallowed_methods,
    reason = "this command runs without workers, so blocking is fine"
)]
/// Prints the screen once or until interrupted. Exits 1 if the gateway does not answer.
pub fn top(args: &TopArgs) -> ExitCode {
    let live = !args.once && std::io::stdout().is_terminal();
    let mut before: Option<(Instant, Value)> = None;
    loop {
        // rates need two samples
        if before.is_some() {
            thread::sleep(PAUSE);
        }
        let status = match args.gateway.ask("GET", "status", &Value::Null) {
            Ok(status) => status,
            Err(error) => {
                let error = printable(&format!("{error:#}"));
                let _ = writeln!(anstream::stderr(), "error: {error}");
                return ExitCode::FAILURE;
            }
        };
        let now = Instant::now();
        if let Some((then, before)) = &before {
            let mut text = String::new();
            screen(&mut text, &status, before, now.duration_since(*then));
            let clear = if live { CLEAR } else { "" };
            let text = clear.to_owned() + &printable(&text);
            // a closed pipe is not a failure
            if std::io::stdout().write_all(text.as_bytes()).is_err() || !live {
                return ExitCode::SUCCESS;
            }
        }
        before = Some((now, status));
    }
}

fn screen(text: &mut String, now: &Value, before: &Value, time: Duration) {
    let per_second = |pick: &dyn Fn(&Value) -> Option<u64>| {
        let counted = |one| pick(one).unwrap_or(0);
        counted(now).saturating_sub(counted(before)) as f64 / time.as_secs_f64().max(0.001)
    };
    let requests = per_second(&|one| one["requests_total"].as_u64());
    let rejected = per_second(&|one| one["rejected_total"].as_u64());
    // writing to a String cannot fail
    let _ = writeln!(
        text,
        "tidegate {} {}  configuration {}\n{requests:.0} requests/s  {rejected:.0} rejected/s  {} in flight  {} connections  {} MiB",
        word(&now["version"]),
        word(&now["state"]),
        word(&now["config"]["hash"]),
        now["in_flight"],
        now["connections"],
        now["memory_bytes"].as_u64().unwrap_or(0) >> 20,
    );
    alarms(text, now);
    let _ = writeln!(
        text,
        "\n{:<20} {:<8} {:<6} {:>11} {:>11} {:>8}  QUOTA",
        "LIMIT", "MODE", "SCOPE", "ADMITTED/s", "REJECTED/s", "KEYS"
    );
    for limit in list(&now["limits"]) {
        let name = word(&limit["name"]);
        let of = |outcome: &'static str| {
            let name = name.clone();
            per_second(&move |one| {
                let limits = list(&one["limits"]);
                let mine = limits.iter().find(|limit| limit["name"] == *name)?;
                mine["decisions"][outcome].as_u64()
            })
        };
        let _ = writeln!(
            text,
            "{name:<20} {:<8} {:<6} {:>11.0} {:>11.0} {:>8}  {}",
            word(&limit["mode"]),
            word(&limit["scope"]),
            of("admitted") + of("delayed"),
            of("rejected"),
            limit["keys"].to_string(),
            quotas(limit),
        );
    }
    let mut keys: Vec<(u64, String, String)> = Vec::new();
    for limit in list(&now["limits"]) {
        keys.extend(list(&limit["top"]).iter().map(|top| {
            let rejected = top["rejected_last_minute"].as_u64().unwrap_or(0);
            (rejected, word(&limit["name"]), word(&top["key"]))
        }));
    }
    keys.sort_by(|one, other| other.cmp(one));
    if !keys.is_empty() {
        let _ = writeln!(text, "\n{:<20} {:>11}  KEY", "REJECTED MOST", "LAST MINUTE");
    }
    for (rejected, limit, key) in keys.into_iter().take(KEYS) {
        let _ = writeln!(text, "{limit:<20} {rejected:>11}  {key}");
    }
}

/// `10/s; pro: 100/s`.
fn quotas(limit: &Value) -> String {
    let one = |quota: &Value| {
        let tiers: Vec<String> = list(&quota["tiers"]).iter().map(word).collect();
        match tiers.as_slice() {
            [] => word(&quota["rate"]),
            tiers => format!("{}: {}", tiers.join(", "), word(&quota["rate"])),
        }
    };
    let all: Vec<String> = list(&limit["quotas"]).iter().map(one).collect();
    all.join("; ")
}

/// Problems that an operator should see first.
fn alarms(text: &mut String, now: &Value) {
    let mut say = |alarm: String| _ = writeln!(text, "!! {alarm}");
    if !now["kill"].is_null() {
        say(format!(
            "every limit is {} by an operator, {}",
            word(&now["kill"]["mode"]),
            match now["kill"]["scope"] == "gateway" {
                true => "at this gateway",
                false => "at all gateways that share a Redis with this one",
            }
        ));
    }
    if now["config"]["last_reload_ok"] == false {
        say("the last reload failed: the previous configuration is still active".to_owned());
    }
    if now["redis"]["degraded"] == true {
        say("Redis does not answer: shared limits run on local fallback".to_owned());
    }
    for upstream in list(&now["upstreams"]) {
        for server in list(&upstream["servers"]) {
            if server["healthy"] == false {
                let (name, server) = (word(&upstream["name"]), word(&server["name"]));
                say(format!("{name}: {server} is out of service"));
            }
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Escapes text, because a client's may contain terminal commands.
fn word(value: &Value) -> String {
    let text = value.as_str().unwrap_or_default();
    text.escape_debug().to_string()
}
