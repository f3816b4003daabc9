//! Text becomes one immutable, checked value.

use std::{net::SocketAddr, num::NonZeroUsize, time::Duration};

use crate::{identity, limit, listener, response, route, telemetry, upstream};

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
    /// `[[route]]`, in the order of the file.
    pub routes: Vec<Route>,
    /// `[response]`.
    pub response: response::Settings,
    /// `[admin]`.
    pub admin: Admin,
    /// `[log]`.
    pub log: telemetry::LogSettings,
    /// A short hash of the text, for `config_info`.
    pub hash: String,
}

/// `[server]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Worker threads; `None` is one per core.
    pub workers: Option<NonZeroUsize>,
    /// How long requests in flight may take after SIGTERM.
    pub drain_timeout: Duration,
    /// Connections over all listeners.
    pub max_connections: usize,
    /// Buckets held in memory.
    pub max_keys: usize,
}

/// One `[limit.NAME]` table.
#[derive(Clone, Debug)]
pub struct Limit {
    /// The name in the configuration; clients see it.
    pub name: String,
    /// Which requests share one bucket; empty is one bucket for all.
    pub key: Vec<identity::KeyPart>,
    /// How it counts.
    pub algorithm: limit::Algorithm,
    /// One quota per tier; the first is the default.
    pub quotas: Vec<limit::Quota>,
    /// Tier name to index into `quotas`.
    pub tiers: Vec<(String, usize)>,
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
    /// Bytes of a request body; `None` is the listener's bound.
    pub max_body_bytes: Option<u64>,
}

/// `[admin]`.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Where the admin pages are served.
    pub address: SocketAddr,
    /// The bearer token; required unless the address is loopback.
    pub token: Option<String>,
}
