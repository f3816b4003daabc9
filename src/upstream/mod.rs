//! Upstreams: servers, timeouts, and connections kept per worker.
//!
//! Read in this order: [`mod@forward`] (one request, top to bottom), [`balance`] (choice of the
//! server), [`state`] (state that all workers share), `exchange` (one exchange over one
//! connection), [`headers`] (the fields sent to the server), [`field_rules`] (hop-by-hop fields and
//! trailers), [`pool`] (connections), [`framing`] (the end of a response), [`body`] (the response
//! body).
//!
//! For HTTP/2 servers, [`http2`] replaces `exchange`, [`framing`] and [`body`]. [`tunnel`] relays a
//! connection that leaves HTTP, and `websocket` decides when one may. [`abandoned`] keeps exchanges
//! whose client is gone.
//!
//! The HTTP/1.1 client is our own, not hyper's. It runs inline in the request's task, without a
//! task per connection or a channel. It writes the inbound head directly into the outbound bytes.
//! It refuses every response of ambiguous length (RFC 9112 §6.3), where hyper picks one reading.

pub mod abandoned;
pub mod balance;
pub mod body;
pub mod echo;
mod endpoint;
mod error;
mod exchange;
pub mod field_rules;
pub mod state;
pub mod forward;
pub mod forwarded_body;
pub mod framing;
mod circuit_breaker;
pub mod headers;
mod health;
pub mod http2;
pub mod pool;
mod resolve;
pub mod retry;
mod request_framing;
mod request_writer;
mod settings;
mod spare_header_map;
mod stream;
pub mod tunnel;
mod websocket;

use std::{rc::Rc, sync::Arc};

use tokio::time::Instant;

pub use balance::Balance;
pub use body::ResponseBody;
pub use circuit_breaker::BreakerConfig;
pub use endpoint::TlsError;
pub use error::{Failed, UpstreamError};
pub use forward::forward;
pub use request_framing::{BodyFraming, body_framing};
pub use settings::{
    Health, HostHeader, MAX_RETRIES, Scheme, ServerAddress, UpstreamSettings, UpstreamTls,
};
pub use spare_header_map::SpareHeaderMap;
pub use state::UpstreamState;
pub use tunnel::Tunnel;

/// One worker's view of an upstream: its servers, each with this worker's connections.
#[derive(Debug)]
pub struct Upstream {
    state: Arc<UpstreamState>,
    pools: Vec<Rc<pool::ServerPool>>,
    balancer: balance::Balancer,
    budget: retry::RetryBudget,
}

impl Upstream {
    /// Opens no connection before the first request. `random` must differ between workers, so that
    /// they choose differently.
    pub fn new(state: Arc<UpstreamState>, random: u64) -> Self {
        let settings = state.settings();
        let pools = (0..settings.servers.len())
            .map(|server| Rc::new(pool::ServerPool::new(Arc::clone(&state), server)))
            .collect();
        Self {
            pools,
            balancer: balance::Balancer::new(settings.balance, random),
            budget: retry::RetryBudget::new(Instant::now()),
            state,
        }
    }

    /// The state that all workers share.
    pub fn state(&self) -> &Arc<UpstreamState> {
        &self.state
    }

    /// Closes connections that have been idle for `idle_timeout`.
    pub fn sweep(&self, now: Instant) {
        for pool in &self.pools {
            pool.sweep(now);
        }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        for pool in &self.pools {
            pool.retire();
        }
    }
}
