//! Fetches the key sets that token issuers publish, off the request path, and refreshes them.
//!
//! ```text
//!          ┌────────── refresh, or a token named an unknown key ◀───────────┐
//!          ▼                                                                │
//! start ─▶ fetch ──▶ good: use it if it changed ────────────────────────────┤
//!            │                                                              │
//!            └─────▶ failed: keep the last good set; retry in 1 s, 2 s, … 60 s
//! ```
//!
//! No request waits for a fetch. Until the first good set, tokens are rejected. Tokens with
//! invented keys trigger at most one fetch per `MISSED_PAUSE`, however many clients send them. Each
//! change of state logs one line.

mod fetch;

use std::{sync::Arc, time::Duration};

use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    identity::{KeyRing, KeySet, KeysUrl, jwt::in_short},
    telemetry::{handles::IssuerMetrics, metrics::Metrics},
};

use fetch::{FetchError, Fetcher};

/// The longest that one fetch may take, from the DNS lookup to the last byte.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two fetches triggered by unknown keys.
const MISSED_PAUSE: Duration = Duration::from_secs(30);
/// How often to check whether a token named an unknown key.
const LOOK: Duration = Duration::from_millis(250);
/// The longest pause after a failure; the first is a second.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// One published key set.
#[derive(Debug)]
pub struct Issuer {
    settings: KeysUrl,
    keys: Arc<KeyRing>,
    /// The URL without its query, which may hold a secret.
    label: String,
    fetcher: Fetcher,
    metrics: IssuerMetrics,
    /// The digest of the set in use.
    digest: Option<[u8; 32]>,
    /// Failed fetches since the last good one.
    failures: u32,
}

impl Issuer {
    /// Creates an issuer without fetching.
    pub fn new(settings: &KeysUrl, keys: &Arc<KeyRing>, metrics: &Metrics) -> Issuer {
        let url = &settings.url;
        let label = format!(
            "{}://{}{}",
            url.scheme_str().unwrap_or_default(),
            url.authority().map_or("", |authority| authority.as_str()),
            url.path()
        );
        Issuer {
            metrics: metrics.issuer(&label),
            settings: settings.clone(),
            keys: Arc::clone(keys),
            label,
            fetcher: Fetcher::default(),
            digest: None,
            failures: 0,
        }
    }

    /// Fetches once, within `FETCH_TIMEOUT`. Counts every result, and logs those that change
    /// the state.
    pub async fn fetch(&mut self) {
        let fetched = timeout(FETCH_TIMEOUT, self.fetcher.get(&self.settings.url)).await;
        let fetched = fetched.unwrap_or(Err(FetchError::Timeout(FETCH_TIMEOUT)));
        match fetched.and_then(|body| self.install(&body)) {
            Ok(()) => self.succeeded(),
            Err(error) => self.failed(&error),
        }
    }

    /// Refreshes the key set forever.
    pub async fn keep_fresh(mut self) {
        let mut missed_at: Option<Instant> = None;
        loop {
            let due = Instant::now() + self.pause();
            while Instant::now() < due {
                sleep(LOOK).await;
                let may_ask = missed_at.is_none_or(|at| at.elapsed() >= MISSED_PAUSE);
                if may_ask && self.keys.take_missed() {
                    missed_at = Some(Instant::now());
                    break;
                }
            }
            self.fetch().await;
        }
    }

    fn pause(&self) -> Duration {
        match self.failures {
            0 => self.settings.refresh,
            failures => {
                let seconds = 1 << (failures - 1).min(6);
                Duration::from_secs(seconds).min(RETRY_MAX)
            }
        }
    }

    fn install(&mut self, body: &[u8]) -> Result<(), FetchError> {
        let digest = Sha256::digest(body).into();
        if self.digest == Some(digest) {
            return Ok(());
        }
        let (set, unused) = KeySet::from_jwks(body, &self.settings.algorithms)?;
        self.metrics.set_keys(set.len());
        tracing::info!(
            url = self.label,
            keys = set.len(),
            unused = in_short(&unused),
            "a key set is in use"
        );
        self.keys.replace(set);
        self.digest = Some(digest);
        Ok(())
    }

    fn succeeded(&mut self) {
        self.metrics.fetched("success");
        self.metrics.refreshed();
        if self.failures > 0 {
            tracing::info!(
                url = self.label,
                failures = self.failures,
                "the key set can be fetched again"
            );
        }
        self.failures = 0;
    }

    fn failed(&mut self, error: &FetchError) {
        self.metrics.fetched(error.kind());
        self.failures = self.failures.saturating_add(1);
        if self.failures > 1 {
            return;
        }
        let url = &self.label;
        match self.digest {
            Some(_) => tracing::warn!(
                url, %error,
                "the key set cannot be fetched: keeping the last good one; will retry"
            ),
            None => tracing::error!(
                url, %error,
                "the key set cannot be fetched, and there is none yet: rejecting its tokens; will retry"
            ),
        }
    }
}
