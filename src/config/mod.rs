//! Compiles the configuration text into one immutable, checked [`Snapshot`], or into a report of
//! every problem.
//!
//! [`compile()`] is the entry point: TOML with positions ([`file`](self)), `${NAME}`, then one
//! module per table. Nothing outside this folder sees the file as written. A documented key whose
//! feature is not built yet is rejected, never ignored; `keys` is the only list.

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
mod renamed;
mod schema;
mod source;
mod units;
mod value;

pub use changes::{Changes, NamedChanges, WrittenConfig};
pub use code::Code;
pub(crate) use diagnostic::count;
pub use diagnostic::{
    Diagnostic, DiagnosticReport, MAX_LINE_BYTES, MAX_SHOWN, Severity, SourceLocation,
};
pub use limit::{
    ConfigOverride, Effect, Exempt, LimitSettings, Mode, Over, OverrideTarget, Share,
    SharedSettings, Slow,
};
pub use quick::{parse_limit, parse_to, quick};
pub use schema::json_schema;

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
use source::SourceText;

use crate::{budget, identity, listener, overload, response, route, telemetry, upstream};

/// Reads a file that the configuration names: a regular file of at most 4 MiB. The error continues
/// the sentence "… cannot be read: ".
pub fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    const MAX_BYTES: u64 = 4 << 20;
    read::bytes(path, MAX_BYTES)
}

/// The largest configuration file.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// A usable configuration, with its warnings.
#[derive(Debug)]
pub struct LoadedConfig {
    /// The compiled configuration.
    pub snapshot: Snapshot,
    /// Warnings only.
    pub warnings: DiagnosticReport,
}

/// Parses a duration given to a running gateway: as in the configuration, but `15m` also means
/// minutes.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let minutes = text.strip_suffix('m').map(|count| format!("{count}min"));
    let parsed = units::duration(minutes.as_deref().unwrap_or(text));
    parsed.map_err(|problem| format!("{}: {}", problem.message, problem.hint))
}

/// Parses a point in time as the configuration writes it: RFC 3339, or a date.
pub fn parse_moment(text: &str) -> Result<SystemTime, String> {
    let written = text.parse().map_err(|_| {
        format!(
            "{} is not a date or time: write for example 2027-01-31T18:00:00Z",
            diagnostic::quote(text)
        )
    })?;
    date::instant(&written).map_err(|problem| format!("{}: {}", problem.message, problem.hint))
}

/// The [`hash`](Snapshot::hash) that [`load`] would compute from the files on disk now, if the file
/// still names the files in `written`. `None` if it is not a regular file: a pipe cannot be read
/// twice.
pub fn fingerprint(path: &Path, written: &WrittenConfig) -> Option<String> {
    const MAX_BYTES: u64 = 64 << 20;
    let kind = path.metadata().ok();
    if kind.is_some_and(|kind| !kind.is_file()) {
        return None;
    }
    let files = read::ConfigFiles::default();
    for path in written.files.keys() {
        // an unreadable file hashes as empty, as it does in `load`
        let _ = files.bytes(path, MAX_BYTES);
    }
    let text = read::bytes(path, MAX_BYTES).unwrap_or_default();
    Some(read::hash(&text, &files.seen()))
}

/// Identity, size and change time of the files of a configuration. Equal stamps mean that nothing
/// was written since, within the file system's clock resolution. Costs one system call per file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamps(Vec<Option<[i64; 5]>>);

impl Stamps {
    /// The current stamps of `path` and of the files in `written`.
    pub fn of(path: &Path, written: &WrittenConfig) -> Stamps {
        let files = written.files.keys().map(PathBuf::as_path);
        let stamp = |path: &Path| {
            let is = path.metadata().ok()?;
            let changed = [is.ctime(), is.ctime_nsec()];
            let which = [is.dev() as i64, is.ino() as i64, is.len() as i64];
            Some([which[0], which[1], which[2], changed[0], changed[1]])
        };
        Stamps(std::iter::once(path).chain(files).map(stamp).collect())
    }

    /// Whether the last change is so old that a new one must get a different time.
    pub fn are_old(&self, now: SystemTime) -> bool {
        const GRAIN_SECONDS: i64 = 2;
        let now = now.duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs() as i64);
        let mut changes = self.0.iter().flatten();
        changes.all(|[.., seconds, _]| (GRAIN_SECONDS..).contains(&(now - seconds)))
    }
}

/// Reads and compiles a file. Its relative paths start at its folder. Blocks on disk reads.
pub fn load(path: &Path) -> Result<LoadedConfig, DiagnosticReport> {
    let name = path.display().to_string();
    let bytes = read::bytes(path, MAX_FILE_BYTES).map_err(|error| {
        let message = format!("{} cannot be read: {error}", diagnostic::quote(&name));
        DiagnosticReport::of_file(
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

fn not_utf8(name: &str, error: &std::string::FromUtf8Error) -> DiagnosticReport {
    let at = error.utf8_error().valid_up_to();
    let source = SourceText::new(name, String::from_utf8_lossy(error.as_bytes()).into_owned());
    let problem = diagnostic::PendingDiagnostic::new(Code::NotUtf8, "this is not UTF-8")
        .hint("save the file as UTF-8");
    let problems = Problems::default();
    // lossy conversion keeps everything before the first bad byte, so the position is right
    problems.at(
        &source,
        at..at + '\u{fffd}'.len_utf8(),
        Severity::Error,
        problem,
    );
    problems.into_report()
}

/// Compiles a text. `source_name` names it in diagnostics, its relative paths start at `base_dir`,
/// and `env` resolves `${NAME}`. Reads the files that the text names. Fails with every problem
/// found.
pub fn compile(
    source_name: &str,
    text: &str,
    base_dir: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<LoadedConfig, DiagnosticReport> {
    let source = SourceText::new(source_name, text.to_owned());
    let problems = Problems::default();
    let files = read::ConfigFiles::default();
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
        Some(snapshot) if report.errors() == 0 => Ok(LoadedConfig {
            snapshot,
            warnings: report,
        }),
        _ => Err(report),
    }
}

/// A checked and compiled configuration. It holds no counters, sockets or metrics.
#[derive(Debug)]
pub struct Snapshot {
    /// `[server]`.
    pub server: ProcessSettings,
    /// `[[listen]]`, at least one.
    pub listeners: Vec<listener::ListenerSettings>,
    /// `[client_ip]` and `[[user]]`.
    pub identity: identity::IdentitySettings,
    /// `[upstream.*]`.
    pub upstreams: Vec<upstream::UpstreamSettings>,
    /// `[limit.*]`, in the order of the file.
    pub limits: Vec<LimitSettings>,
    /// `[gateway] limits`, as indexes into `limits`: they apply to requests without a route.
    pub gateway_limits: Vec<usize>,
    /// `[[route]]`, in the order of the file.
    pub routes: Vec<RouteSettings>,
    /// `[response]`.
    pub response: response::ResponseSettings,
    /// The path of the quota status page, in normal form.
    pub status_path: Option<String>,
    /// `[overload]`; `None` if load shedding is off.
    pub overload: Option<overload::OverloadSettings>,
    /// `[redis]`; `None` if no limit is shared.
    pub redis: Option<budget::RedisSettings>,
    /// `[admin]`.
    pub admin: AdminSettings,
    /// `[log]`.
    pub log: telemetry::LogSettings,
    /// `[trace]`.
    pub trace: telemetry::trace::TraceSettings,
    /// A short hash of the text and of the files that it names, for `config_info`.
    pub hash: String,
    /// The configuration as written, to list what the next reload changes.
    pub written: WrittenConfig,
}

/// `[server]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSettings {
    /// Worker threads; `None` is one per core.
    pub workers: Option<NonZeroUsize>,
    /// How long to keep accepting requests after SIGTERM while `/readyz` already fails.
    pub drain_delay: Duration,
    /// How long requests in flight may take after `drain_delay`.
    pub drain_timeout: Duration,
    /// Connections over all listeners.
    pub max_connections: usize,
    /// Connections per client address.
    pub max_connections_per_ip: usize,
    /// Buckets held in memory.
    pub max_keys: usize,
    /// Bytes of all request bodies buffered to read keys from them.
    pub max_body_buffer: usize,
    /// Whether a change of the files triggers a reload.
    pub watch_config: bool,
}

impl ProcessSettings {
    /// The number of worker threads.
    pub fn worker_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().ok();
        self.workers.or_else(cores).map_or(1, NonZeroUsize::get)
    }
}

/// One `[[route]]` table.
#[derive(Clone, Debug)]
pub struct RouteSettings {
    /// The name in the configuration.
    pub name: String,
    /// What it matches.
    pub pattern: route::Pattern,
    /// Index into `Snapshot::upstreams`.
    pub upstream: usize,
    /// Every limit that applies to its requests, as indexes into `Snapshot::limits`: the
    /// gateway's and its own, minus those skipped.
    pub limits: Vec<usize>,
    /// Units that a request takes from each of its limits.
    pub cost: u64,
    /// The shedding priority under overload.
    pub priority: overload::Priority,
    /// Bytes of a request body; `None` uses the listener's bound.
    pub max_body_bytes: Option<u64>,
}

/// `[admin]`. Its `Debug` form hides the token.
#[derive(Clone)]
pub struct AdminSettings {
    /// The address of the admin listener.
    pub address: SocketAddr,
    /// The bearer token; required unless the address is loopback.
    pub token: Option<String>,
    /// Peers whose identity headers `/check` trusts.
    pub check_identity_from: identity::TrustedProxies,
}

/// The report for a valid configuration that this process cannot apply.
pub fn unfit(file: &str, why: String) -> DiagnosticReport {
    let hint = "the previous configuration is still active; fix the cause and reload again";
    DiagnosticReport::of_file(Code::Unfit, file, why, hint)
}

impl fmt::Debug for AdminSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "…");
        f.debug_struct("Admin")
            .field("address", &self.address)
            .field("token", &token)
            .field("check_identity_from", &self.check_identity_from)
            .finish()
    }
}
