//! Reloads replaced certificate files while the gateway runs, and warns of certificates that expire
//! soon.
//!
//! Compares file contents every few seconds, off the workers. File notifications miss mounted
//! volumes: a ConfigMap swaps a symlink two folders up, and a bind-mounted file never fires.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::{Instant, MissedTickBehavior};

use crate::{
    config,
    listener::{
        self, ListenerTls,
        tls::{SetupError, certificate::Validity},
    },
    telemetry::Metrics,
};

/// The certificates of every listener.
#[derive(Debug)]
pub(super) struct Certificates {
    /// By listener, in configuration order; `None` without TLS.
    listeners: Vec<Option<Arc<ListenerTls>>>,
    /// By listener: the validity of the certificates in use.
    validity: Vec<Vec<Validity>>,
    metrics: Metrics,
}

/// How often files are compared with the certificates in use.
const POLL: Duration = Duration::from_secs(2);
/// How often to repeat the warning about a certificate that expires soon.
const REMINDER: Duration = Duration::from_secs(24 * 3600);

impl Certificates {
    /// Applies the certificates of the checked configuration. A listener that had TLS `before`
    /// with the same files and bounds keeps it, with its clients' TLS sessions. The watch then
    /// picks up new file contents.
    pub(super) fn apply(
        listeners: &[listener::ListenerSettings],
        before: &[Option<Arc<ListenerTls>>],
        metrics: &Metrics,
    ) -> Result<Self, SetupError> {
        let mut certificates = Self {
            listeners: Vec::with_capacity(listeners.len()),
            validity: Vec::with_capacity(listeners.len()),
            metrics: metrics.clone(),
        };
        for (at, listener) in listeners.iter().enumerate() {
            let tls = listener.tls.clone();
            let validity = tls.as_ref().map(|tls| tls.material.validity.clone());
            certificates.validity.push(validity.unwrap_or_default());
            let running = before.get(at).and_then(Option::as_ref);
            let tls = tls.map(|tls| match running {
                Some(running) if running.serves(&tls, listener.http2) => Ok(Arc::clone(running)),
                _ => ListenerTls::new(tls, listener.http2).map(Arc::new),
            });
            certificates.listeners.push(tls.transpose()?);
        }
        certificates.show();
        Ok(certificates)
    }

    /// The TLS of each listener, in configuration order.
    pub(super) fn listeners(&self) -> impl Iterator<Item = Option<Arc<ListenerTls>>> {
        self.listeners.iter().cloned()
    }

    /// Reloads replaced files and warns of expiry until the process ends.
    pub(super) async fn watch(mut self) {
        if self.listeners.iter().all(Option::is_none) {
            return;
        }
        let mut ticks = tokio::time::interval(POLL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // `check` and the start have already warned
        let mut reminder = Instant::now() + REMINDER;
        loop {
            ticks.tick().await;
            // the disk may be slow, and this thread also handles signals
            let Ok(certificates) = tokio::task::spawn_blocking(move || self.reload()).await else {
                tracing::error!("certificates are no longer watched: restart to load new ones");
                return;
            };
            self = certificates;
            if Instant::now() >= reminder {
                reminder = Instant::now() + REMINDER;
                self.warn_of_expiry();
            }
        }
    }

    fn reload(mut self) -> Self {
        let mut changed = false;
        for (tls, validity) in self.listeners.iter().zip(&mut self.validity) {
            let Some(tls) = tls else { continue };
            match tls.reload(&config::read_file) {
                Ok(None) => {}
                Ok(Some(material)) => {
                    *validity = material.validity;
                    changed = true;
                    let files: Vec<&str> = validity.iter().map(|file| &*file.name).collect();
                    tracing::info!(files = files.join(", "), "certificates have been replaced");
                }
                Err(error) => tracing::error!(
                    %error,
                    "changed certificates cannot be used; keeping the old ones"
                ),
            }
        }
        if changed {
            self.show();
            self.warn_of_expiry();
        }
        self
    }

    fn show(&self) {
        for file in self.validity.iter().flatten() {
            self.metrics.certificate_expires(&file.name, file.not_after);
        }
    }

    fn warn_of_expiry(&self) {
        let now = SystemTime::now();
        for file in self.validity.iter().flatten() {
            if let Some(doubt) = file.warning(now) {
                tracing::warn!(file = file.name, "a certificate {doubt}");
            }
        }
    }
}
