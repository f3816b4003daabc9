//! DNS resolution of server names: off the request path, periodic, keeping the last good answer.
//!
//! The system resolver reports no TTL, so a name is resolved every [`EVERY`], and sooner while that
//! fails. At most one lookup per name runs at a time. Workers read the addresses when they open a
//! connection, and detect changes by a counter.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

/// Interval between lookups of a name.
const EVERY: Duration = Duration::from_secs(10);
/// Interval after a failed lookup.
const AGAIN: Duration = Duration::from_secs(1);
/// Most addresses used per name.
const MAX_ADDRESSES: usize = 32;

/// The addresses of one server.
#[derive(Debug)]
pub(super) enum ServerAddresses {
    /// Configured as an address.
    Fixed(SocketAddr),
    Named(ResolvedName),
}

/// A name and its last known addresses.
#[derive(Debug)]
pub(super) struct ResolvedName {
    host: String,
    port: u16,
    known: watch::Sender<Known>,
    /// Counts changes.
    generation: AtomicU64,
    /// Round robin over the addresses.
    turn: AtomicUsize,
}

#[derive(Clone, Debug)]
enum Known {
    /// The first lookup is in progress.
    Nothing,
    /// No lookup has succeeded yet.
    Unknown(String),
    Addresses(Arc<[SocketAddr]>),
}

impl ServerAddresses {
    pub(super) fn new(host: &str, port: u16) -> Self {
        match host.parse::<IpAddr>() {
            Ok(ip) => Self::Fixed(SocketAddr::new(ip, port)),
            Err(_) => Self::Named(ResolvedName {
                host: host.to_owned(),
                port,
                known: watch::Sender::new(Known::Nothing),
                generation: AtomicU64::new(0),
                turn: AtomicUsize::new(0),
            }),
        }
    }

    /// Changes when the addresses do.
    pub(super) fn generation(&self) -> u64 {
        match self {
            Self::Fixed(_) => 0,
            Self::Named(named) => named.generation.load(Relaxed),
        }
    }

    /// Whether the server is still at this address.
    pub(super) fn has(&self, address: SocketAddr) -> bool {
        match self {
            Self::Fixed(fixed) => *fixed == address,
            Self::Named(named) => match &*named.known.borrow() {
                Known::Addresses(known) => known.contains(&address),
                Known::Nothing | Known::Unknown(_) => true,
            },
        }
    }

    /// Tries one address after another, each for its share of the remaining time. Waits for the
    /// first lookup.
    pub(super) async fn connect<S, F>(
        &self,
        give_up: Instant,
        open: impl Fn(SocketAddr) -> F,
    ) -> io::Result<S>
    where
        F: Future<Output = io::Result<S>>,
    {
        let named = match self {
            Self::Fixed(address) => return open(*address).await,
            Self::Named(named) => named,
        };
        let known = named.addresses().await?;
        let first = named.turn.fetch_add(1, Relaxed);
        let mut failed = None;
        for tried in 0..known.len() {
            let address = known[first.wrapping_add(tried) % known.len()];
            let left = give_up.saturating_duration_since(Instant::now());
            let share = left / u32::try_from(known.len() - tried).unwrap_or(1);
            match tokio::time::timeout(share, open(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => failed = Some(error),
                Err(_) => failed = Some(io::ErrorKind::TimedOut.into()),
            }
        }
        Err(failed.unwrap_or_else(|| io::Error::other("the name has no address")))
    }
}

impl ResolvedName {
    async fn addresses(&self) -> io::Result<Arc<[SocketAddr]>> {
        let mut known = self.known.subscribe();
        let known = known
            .wait_for(|known| !matches!(known, Known::Nothing))
            .await;
        match known.as_deref() {
            Ok(Known::Addresses(addresses)) => Ok(Arc::clone(addresses)),
            Ok(Known::Unknown(error)) => Err(io::Error::other(error.clone())),
            Ok(Known::Nothing) | Err(_) => Err(io::Error::other("the name is not resolved yet")),
        }
    }

    /// Resolves the name forever.
    pub(super) async fn keep_resolving(&self, upstream: &str) {
        let mut was_good = true;
        loop {
            let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await;
            let found = found.map(|addresses| {
                let mut addresses: Vec<_> = addresses.take(MAX_ADDRESSES).collect();
                addresses.sort_unstable();
                addresses.dedup();
                addresses
            });
            let problem = match found {
                Ok(addresses) if !addresses.is_empty() => {
                    self.learn(upstream, &addresses, was_good);
                    None
                }
                Ok(_) => Some("it has no address".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = &problem
                && was_good
            {
                let host = &self.host;
                tracing::warn!(upstream, host, error = %problem, "cannot resolve a server's name; keeping its last known addresses");
            }
            was_good = problem.is_none();
            if let Some(problem) = problem {
                self.fail(&problem);
            }
            tokio::time::sleep(if was_good { EVERY } else { AGAIN }).await;
        }
    }

    fn learn(&self, upstream: &str, found: &[SocketAddr], was_good: bool) {
        let is_new = self.known.send_if_modified(|known| {
            let is_new = !matches!(known, Known::Addresses(known) if **known == *found);
            if is_new {
                *known = Known::Addresses(found.into());
            }
            is_new
        });
        if is_new {
            self.generation.fetch_add(1, Relaxed);
        }
        if is_new || !was_good {
            tracing::info!(upstream, host = self.host, addresses = ?found, "resolved a server's name");
        }
    }

    fn fail(&self, problem: &str) {
        self.known.send_if_modified(|known| {
            let knows_nothing = !matches!(known, Known::Addresses(_));
            if knows_nothing {
                *known = Known::Unknown(format!("cannot resolve {}: {problem}", self.host));
            }
            knows_nothing
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(host: &str) -> ResolvedName {
        match ServerAddresses::new(host, 80) {
            ServerAddresses::Named(named) => named,
            ServerAddresses::Fixed(address) => panic!("{address} is an address"),
        }
    }

    fn address(last: u8) -> SocketAddr {
        ([192, 0, 2, last], 80).into()
    }

    #[test]
    fn an_address_is_never_looked_up() {
        assert!(
            matches!(ServerAddresses::new("::1", 81), ServerAddresses::Fixed(a) if a.port() == 81)
        );
        assert!(matches!(
            ServerAddresses::new("10.0.0.1", 80),
            ServerAddresses::Fixed(_)
        ));
    }

    #[tokio::test]
    async fn the_last_good_answer_outlives_a_failure() {
        let named = named("origin");
        named.fail("no such host");
        let error = named.addresses().await.expect_err("nothing is known");
        assert_eq!(error.to_string(), "cannot resolve origin: no such host");
        named.learn("up", &[address(1)], false);
        named.fail("the resolver is away");
        assert_eq!(*named.addresses().await.expect("known"), [address(1)]);
        let generation = named.generation.load(Relaxed);
        named.learn("up", &[address(1)], true);
        assert_eq!(named.generation.load(Relaxed), generation, "no change");
        named.learn("up", &[address(2)], true);
        assert_eq!(named.generation.load(Relaxed), generation + 1);
        let addresses = ServerAddresses::Named(named);
        assert!(!addresses.has(address(1)) && addresses.has(address(2)));
    }

    #[tokio::test]
    async fn connections_take_turns_over_the_addresses_and_pass_over_a_dead_one() {
        let named = named("origin");
        named.learn("up", &[address(1), address(2), address(3)], true);
        let addresses = ServerAddresses::Named(named);
        let give_up = Instant::now() + Duration::from_secs(10);
        let mut reached = Vec::new();
        for _ in 0..4 {
            let open = async |to: SocketAddr| match to == address(2) {
                true => Err(io::ErrorKind::ConnectionRefused.into()),
                false => Ok(to),
            };
            reached.push(addresses.connect(give_up, open).await.expect("one lives"));
        }
        assert_eq!(reached, [1, 3, 3, 1].map(address));
    }

    #[tokio::test]
    async fn an_address_that_is_silent_leaves_time_for_the_next() {
        let named = named("origin");
        named.learn("up", &[address(1), address(2)], true);
        let addresses = ServerAddresses::Named(named);
        let give_up = Instant::now() + Duration::from_millis(200);
        let open = async |to: SocketAddr| {
            if to == address(1) {
                std::future::pending::<()>().await;
            }
            Ok(to)
        };
        let reached = addresses.connect(give_up, open).await;
        assert_eq!(reached.expect("the second"), address(2));
    }
}
