//! `tidegate run`: loads the configuration, starts the gateway, prints the banner, and serves until
//! a signal.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use serde_json::json;

use super::config_file::ConfigFile;
use crate::{
    config::{self, DiagnosticReport, LoadedConfig, Mode, Snapshot},
    identity::{AddressSource, KeyPart},
    listener::{BindAddress, BindMode},
    server::{self, Running},
    telemetry::{self, Metrics},
    upstream,
};

/// Arguments of `tidegate run`.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    config: ConfigFile,
    /// Instead of a file: the server behind the gateway, for example http://localhost:3000
    #[arg(long, value_name = "URL", value_parser = config::parse_to, conflicts_with_all = ["file", "config"])]
    to: Option<String>,
    /// With --to: the rate limit per client address, for example 60/min
    #[arg(long, value_name = "RATE", requires = "to", default_value = "100/s", value_parser = config::parse_limit)]
    limit: String,
    /// With --to: the address to listen on
    #[arg(
        long,
        value_name = "ADDRESS",
        requires = "to",
        default_value = "127.0.0.1:8080"
    )]
    listen: String,
    /// With --to: the admin address
    #[arg(
        long,
        value_name = "ADDRESS",
        requires = "to",
        default_value = "127.0.0.1:9901"
    )]
    admin: String,
    /// Print the configuration that --to and --limit generate, and exit
    #[arg(long, requires = "to")]
    print_config: bool,
    /// Share the addresses of a running gateway of the same user to replace it: once this one
    /// is ready, send the old one SIGUSR1
    #[arg(long)]
    beside: bool,
    /// Once ready, write the process id and the bound addresses to this file as JSON
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
}

/// Serves until SIGTERM or SIGINT. Exits 0 after a drain, 1 if the gateway cannot start.
pub fn run(args: &RunArgs) -> ExitCode {
    match try_run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(args: &RunArgs) -> anyhow::Result<()> {
    let path = args.config.path();
    let loaded = match &args.to {
        Some(to) => {
            let text = config::quick(to, &args.limit, Some(&args.listen), Some(&args.admin));
            let compiled = config::compile("command line", &text, Path::new(""), &|name| {
                std::env::var(name).ok()
            });
            if args.print_config && compiled.is_ok() {
                io::stdout().write_all(text.as_bytes())?;
                return Ok(());
            }
            compiled
        }
        None => config::load(&path),
    };
    let LoadedConfig { snapshot, warnings } = loaded.map_err(refused)?;
    let metrics = Metrics::install();
    let log = telemetry::log::init(&snapshot.log, metrics.log_lines_dropped())?;
    let file = args.to.is_none().then_some(&*path);
    let company = match args.beside {
        true => BindMode::Beside,
        false => BindMode::Alone,
    };
    let running = server::start(snapshot, file.map(Path::to_owned), metrics, company)?;
    let mut stderr = anstream::stderr();
    let shown = stderr.write_all(banner(&running, file).as_bytes());
    // serve even if the banner cannot be written
    let _ = shown.and_then(|()| stderr.write_all(warnings.text(true).as_bytes()));
    if let Some(path) = &args.ready_file {
        write_ready_file(path, &running)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    running.serve();
    // give queued lines a moment, but do not wait for a stalled reader
    log.close(LOG_PATIENCE);
    Ok(())
}

fn refused(report: DiagnosticReport) -> anyhow::Error {
    let _ = anstream::stderr().write_all(report.text(true).as_bytes());
    anyhow::anyhow!("{}", report.summary())
}

/// The start-up banner: addresses, routes and limits.
fn banner(running: &Running, file: Option<&Path>) -> String {
    let snapshot = running.snapshot();
    let mut text = format!("tidegate {}", env!("CARGO_PKG_VERSION"));
    if let Some(file) = file {
        let _ = write!(text, "  {}", file.display());
    }
    text.push('\n');
    for (address, settings) in running.listeners.iter().zip(&snapshot.listeners) {
        let scheme = match (address, &settings.tls) {
            (BindAddress::Tcp(_), None) => "http://",
            (BindAddress::Tcp(_), Some(_)) => "https://",
            (BindAddress::Unix(_) | BindAddress::Systemd(_), _) => "",
        };
        let _ = writeln!(text, "  listening  {scheme}{address}");
    }
    list_routes(&mut text, &snapshot);
    list_limits(&mut text, &snapshot);
    let workers = if running.workers == 1 {
        "1 worker".to_owned()
    } else {
        format!("{} workers", running.workers)
    };
    let _ = writeln!(
        text,
        "  admin      http://{}  (metrics, health)\n  ready      {workers}; end with Ctrl-C",
        running.admin
    );
    if counts_addresses(&snapshot) && may_be_behind_a_proxy(&snapshot) {
        text.push_str("  hint       behind a load balancer? set client_ip.trusted_proxies, or all its clients count as one\n");
    }
    text
}

fn list_routes(text: &mut String, snapshot: &Snapshot) {
    for (index, route) in snapshot.routes.iter().enumerate() {
        if index == MAX_SHOWN {
            let _ = writeln!(
                text,
                "  route      … and {} more",
                snapshot.routes.len() - index
            );
            break;
        }
        let upstream = &snapshot.upstreams[route.upstream];
        let servers: Vec<String> = upstream
            .servers
            .iter()
            .map(upstream::ServerAddress::to_string)
            .collect();
        let limits: Vec<&str> = route
            .limits
            .iter()
            .map(|&limit| snapshot.limits[limit].name.as_str())
            .collect();
        let limits = if limits.is_empty() {
            "no limit".to_owned()
        } else {
            limits.join(", ")
        };
        let _ = writeln!(
            text,
            "  route      {:<16} {} → {}  [{limits}]",
            route.name,
            route.pattern,
            servers.join(", ")
        );
    }
}

fn list_limits(text: &mut String, snapshot: &Snapshot) {
    for (index, limit) in snapshot.limits.iter().enumerate() {
        if index == MAX_SHOWN {
            let _ = writeln!(
                text,
                "  limit      … and {} more",
                snapshot.limits.len() - index
            );
            break;
        }
        let _ = writeln!(
            text,
            "  limit      {:<16} {}, {}{}",
            limit.name,
            allowance(limit),
            match limit.shared {
                Some(_) => "shared through Redis",
                None => "local counters",
            },
            enforcement(limit)
        );
    }
}

/// How long the process waits at exit for standard error to take the last lines.
const LOG_PATIENCE: Duration = Duration::from_secs(1);

/// The most routes and the most limits that the banner lists.
const MAX_SHOWN: usize = 12;

fn counts_addresses(snapshot: &Snapshot) -> bool {
    snapshot
        .limits
        .iter()
        .flat_map(|limit| &limit.key)
        .any(KeyPart::has_address)
}

/// Whether requests may come through an unlisted proxy: a listener is not loopback, or is a Unix
/// socket, which only proxies use.
fn may_be_behind_a_proxy(snapshot: &Snapshot) -> bool {
    let identity = &snapshot.identity;
    let is_local =
        |address: &BindAddress| matches!(address, BindAddress::Tcp(tcp) if tcp.ip().is_loopback());
    identity.trusted_proxies.is_empty()
        && identity.trusted_hops.is_none()
        && identity.address_from != AddressSource::None
        && !snapshot
            .listeners
            .iter()
            .all(|listener| is_local(&listener.address))
}

/// `100/s per client IP, burst 200; pro: 600/min, burst 50`.
fn allowance(limit: &config::LimitSettings) -> String {
    let per = limit
        .key
        .iter()
        .map(KeyPart::in_words)
        .collect::<Vec<_>>()
        .join(" and ");
    let per = match per.is_empty() {
        true => "in total".to_owned(),
        false => format!("per {per}"),
    };
    let default = &limit.quotas[0];
    let mut text = format!("{default} {per}, burst {}", default.burst);
    for (tier, index) in limit.tiers.iter().filter(|(_, index)| *index > 0) {
        let quota = &limit.quotas[*index];
        let _ = write!(text, "; {tier}: {quota}, burst {}", quota.burst);
    }
    text
}

/// `, mode = "shadow"`; empty for a limit that rejects. An operator sees at the start that a limit
/// protects nothing.
fn enforcement(limit: &config::LimitSettings) -> String {
    match limit.mode {
        Mode::Enforce if limit.enforce_percent < 100 => {
            format!(", enforce_percent = {}", limit.enforce_percent)
        }
        Mode::Enforce => String::new(),
        mode => format!(", mode = \"{}\"", mode.as_str()),
    }
}

/// Writes to a temporary file and renames it, so a reader never sees a partial file.
fn write_ready_file(path: &Path, running: &Running) -> io::Result<()> {
    let listeners: Vec<String> = running
        .listeners
        .iter()
        .map(BindAddress::to_string)
        .collect();
    let ready = json!({ "pid": std::process::id(), "listeners": listeners, "admin": running.admin.to_string() });
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".tmp");
    std::fs::write(&unfinished, format!("{ready}\n"))?;
    std::fs::rename(&unfinished, path)
}
