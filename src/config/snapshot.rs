//! The checked configuration that everything else reads: pure data, without counters or sockets.

use std::{fmt, net::SocketAddr, num::NonZeroUsize, time::Duration};

use super::{limit::LimitSettings, written::WrittenConfig};
use crate::{budget, identity, listener, overload, response, route, telemetry, upstream};

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
