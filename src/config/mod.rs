//! Text becomes one immutable, checked value, or a report of everything that is wrong with it.
//!
//! [`compile()`] is the whole way: TOML with positions ([`file`](self)), `${NAME}`, one module per table, and a
//! [`Snapshot`] at the end. Nothing outside this folder sees the file as it was written. A key of the documented
//! configuration whose feature does not exist yet is refused (`keys.rs` is the one list), never ignored.

mod changes;
mod code;
mod compile;
mod date;
mod diagnostic;
mod environment;
mod file;
mod keys;
mod limit;
mod quick;
mod read;
mod source;
mod units;
mod value;

pub use changes::{Changes, Named, Written};
pub use code::Code;
pub(crate) use diagnostic::count;
pub use diagnostic::{Diagnostic, MAX_LINE_BYTES, MAX_SHOWN, Place, Report, Severity};
pub use limit::{Effect, Exempt, Limit, Mode, Over, Override, Share, Shared, Slow, Whom};
pub use quick::{parse_limit, parse_to, quick};

use std::{
    fmt,
    net::SocketAddr,
    num::NonZeroUsize,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use diagnostic::Problems;
use file::Document;
use source::Source;

use crate::{budget, identity, listener, overload, response, route, telemetry, upstream};

/// Reads a file that the configuration names: a regular one, of a bounded size. The error is a phrase that continues
/// "… cannot be read: ".
pub fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    const MAX_BYTES: u64 = 4 << 20;
    read::bytes(path, MAX_BYTES)
}

/// The largest configuration file.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// A configuration that can be used, and what looks wrong with it all the same.
#[derive(Debug)]
pub struct Loaded {
    /// What was configured.
    pub snapshot: Snapshot,
    /// Warnings only.
    pub warnings: Report,
}

/// A span as people write it to a running gateway: as in a configuration, and `15m` for minutes.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let minutes = text.strip_suffix('m').map(|count| format!("{count}min"));
    let parsed = units::duration(minutes.as_deref().unwrap_or(text));
    parsed.map_err(|problem| format!("{}: {}", problem.message, problem.hint))
}

/// A moment as a configuration writes it: RFC 3339, or a date.
pub fn parse_moment(text: &str) -> Result<SystemTime, String> {
    let written = text.parse().map_err(|_| {
        format!(
            "{} is no moment: write such as 2027-01-31T18:00:00Z",
            diagnostic::quote(text)
        )
    })?;
    date::instant(&written).map_err(|problem| format!("{}: {}", problem.message, problem.hint))
}

/// What [`load`] would call the [`hash`](Snapshot::hash) of a file as it is on the disk now, if it still names the files that
/// it named when it was `written`. `None` where it is no file (a pipe cannot be read twice).
pub fn fingerprint(path: &Path, written: &Written) -> Option<String> {
    const MAX_BYTES: u64 = 64 << 20;
    let kind = path.metadata().ok();
    if kind.is_some_and(|kind| !kind.is_file()) {
        return None;
    }
    let files = read::Files::default();
    for path in written.files.keys() {
        // one that cannot be read has an empty content, as when a configuration names it
        let _ = files.bytes(path, MAX_BYTES);
    }
    let text = read::bytes(path, MAX_BYTES).unwrap_or_default();
    Some(read::hash(&text, &files.seen()))
}

/// Which files a configuration was read from, their sizes, and when they last changed: alike, nobody has written to them since,
/// but within the grain of the file system's clock. Costs a system call for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamps(Vec<Option<[i64; 5]>>);

impl Stamps {
    /// Those of a file that is `written` so, as they are on the disk now.
    pub fn of(path: &Path, written: &Written) -> Stamps {
        let files = written.files.keys().map(PathBuf::as_path);
        let stamp = |path: &Path| {
            let is = path.metadata().ok()?;
            let changed = [is.ctime(), is.ctime_nsec()];
            let which = [is.dev() as i64, is.ino() as i64, is.len() as i64];
            Some([which[0], which[1], which[2], changed[0], changed[1]])
        };
        Stamps(std::iter::once(path).chain(files).map(stamp).collect())
    }

    /// Whether the last change is so long ago that another one would have another time.
    pub fn are_old(&self, now: SystemTime) -> bool {
        const GRAIN_SECONDS: i64 = 2;
        let now = now.duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs() as i64);
        let mut changes = self.0.iter().flatten();
        changes.all(|[.., seconds, _]| (GRAIN_SECONDS..).contains(&(now - seconds)))
    }
}

/// Reads and compiles a file; its relative paths start at its folder. Blocks on the disk.
pub fn load(path: &Path) -> Result<Loaded, Report> {
    let name = path.display().to_string();
    let bytes = read::bytes(path, MAX_FILE_BYTES).map_err(|error| {
        let message = format!("{} cannot be read: {error}", diagnostic::quote(&name));
        Report::of_file(
            Code::Unreadable,
            &name,
            message,
            "name the file with --config; `tidegate init` prints one to start from",
        )
    })?;
    let text = String::from_utf8(bytes).map_err(|error| not_utf8(&name, &error))?;
    let base_dir = path.parent().unwrap_or(Path::new(""));
    compile(&name, &text, base_dir, &|variable| {
        std::env::var(variable).ok()
    })
}

fn not_utf8(name: &str, error: &std::string::FromUtf8Error) -> Report {
    let at = error.utf8_error().valid_up_to();
    let source = Source::new(name, String::from_utf8_lossy(error.as_bytes()).into_owned());
    let problem =
        diagnostic::Problem::new(Code::NotUtf8, "this is not UTF-8").hint("save the file as UTF-8");
    let problems = Problems::default();
    // up to the first bad byte the text is unchanged, so the position is still right
    problems.at(
        &source,
        at..at + '\u{fffd}'.len_utf8(),
        Severity::Error,
        problem,
    );
    problems.into_report()
}

/// Compiles a text; `source_name` is what diagnostics call it, `base_dir` is where its relative paths start, `env`
/// answers for `${NAME}`. Reads the files that the text names. Fails with every problem that was found.
pub fn compile(
    source_name: &str,
    text: &str,
    base_dir: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Loaded, Report> {
    let source = Source::new(source_name, text.to_owned());
    let problems = Problems::default();
    let files = read::Files::default();
    let document = Document {
        source: &source,
        problems: &problems,
        files: &files,
        env,
    };
    let tables = document.parse(source.text());
    let snapshot = tables.and_then(|tables| compile::snapshot(document, base_dir, &tables));
    let report = problems.into_report();
    match snapshot {
        Some(snapshot) if report.errors() == 0 => Ok(Loaded {
            snapshot,
            warnings: report,
        }),
        _ => Err(report),
    }
}

/// A configuration that was checked and compiled. Pure: it holds no counters, sockets or metrics.
#[derive(Debug)]
pub struct Snapshot {
    /// `[server]`.
    pub server: Server,
    /// `[[listen]]`, at least one.
    pub listeners: Vec<listener::Settings>,
    /// `[client_ip]` and `[[user]]`.
    pub identity: identity::Settings,
    /// `[upstream.*]`.
    pub upstreams: Vec<upstream::Settings>,
    /// `[limit.*]`, in the order of the file.
    pub limits: Vec<Limit>,
    /// `[gateway] limits`, as indexes into `limits`: what a request meets that no route takes.
    pub gateway_limits: Vec<usize>,
    /// `[[route]]`, in the order of the file.
    pub routes: Vec<Route>,
    /// `[response]`.
    pub response: response::Settings,
    /// Where callers find their own quotas, in the form in which paths are matched.
    pub status_path: Option<String>,
    /// `[overload]`; `None` where nothing is shed.
    pub overload: Option<overload::Settings>,
    /// `[redis]`; `None` where no limit is shared.
    pub redis: Option<budget::Settings>,
    /// `[admin]`.
    pub admin: Admin,
    /// `[log]`.
    pub log: telemetry::LogSettings,
    /// `[trace]`.
    pub trace: telemetry::trace::TraceSettings,
    /// A short hash of the text and of the files that it names, for `config_info`.
    pub hash: String,
    /// What was written, to tell what the next one changes.
    pub written: Written,
}

/// `[server]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Worker threads; `None` is one per core.
    pub workers: Option<NonZeroUsize>,
    /// How long requests are still accepted after SIGTERM, while the gateway says that it is not ready.
    pub drain_delay: Duration,
    /// How long requests in flight may take after that.
    pub drain_timeout: Duration,
    /// Connections over all listeners.
    pub max_connections: usize,
    /// Of one address.
    pub max_connections_per_ip: usize,
    /// Buckets held in memory.
    pub max_keys: usize,
    /// Bytes of all bodies together that are read before their requests are decided.
    pub max_body_buffer: usize,
    /// The files are watched, and a change of them reloads.
    pub watch_config: bool,
}

impl Server {
    /// So many workers serve.
    pub fn worker_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().ok();
        self.workers.or_else(cores).map_or(1, NonZeroUsize::get)
    }
}

/// One `[[route]]` table.
#[derive(Clone, Debug)]
pub struct Route {
    /// The name in the configuration.
    pub name: String,
    /// What it matches.
    pub pattern: route::Pattern,
    /// Index into `Snapshot::upstreams`.
    pub upstream: usize,
    /// Every limit that its requests meet (the gateway's and its own, less those skipped), as indexes into
    /// `Snapshot::limits`.
    pub limits: Vec<usize>,
    /// Units that a request takes from each of its limits.
    pub cost: u64,
    /// Who is shed last under overload.
    pub priority: overload::Priority,
    /// Bytes of a request body; `None` is the listener's bound.
    pub max_body_bytes: Option<u64>,
}

/// `[admin]`. Its `Debug` form says only whether there is a token.
#[derive(Clone)]
pub struct Admin {
    /// Where the admin pages are served.
    pub address: SocketAddr,
    /// The bearer token; required unless the address is loopback.
    pub token: Option<String>,
    /// Peers of `/check` whose identity headers are believed.
    pub check_identity_from: identity::TrustedProxies,
}

/// What a configuration that is correct cannot be put to work for.
pub fn unfit(file: &str, why: String) -> Report {
    let hint = "the configuration that ran before still runs; mend the cause and reload again";
    Report::of_file(Code::Unfit, file, why, hint)
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "…");
        f.debug_struct("Admin")
            .field("address", &self.address)
            .field("token", &token)
            .field("check_identity_from", &self.check_identity_from)
            .finish()
    }
}
