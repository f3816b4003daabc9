//! TLS handshakes in progress on one worker: bounded in time and number.
//!
//! A client that connects and sends nothing costs memory until `header_timeout`. At the bound the
//! oldest handshake is closed instead of the newest refused. Honest clients finish within two round
//! trips, so they get through a flood, while the flood evicts itself.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    rc::Rc,
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustls::{Error, HandshakeKind};
use tokio::sync::Notify;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{ListenerTls, client};
use crate::{
    identity::ClientCertificate,
    listener::{protocol::Protocol, stream::ClientStream},
    telemetry::handles::HandshakeMetrics,
};

/// The handshakes of one listener on one worker.
#[derive(Debug)]
pub struct Handshakes {
    tls: Arc<ListenerTls>,
    metrics: HandshakeMetrics,
    next: Cell<u64>,
    /// Oldest first.
    under_way: RefCell<BTreeMap<u64, Rc<Notify>>>,
}

/// Result of a handshake.
#[derive(Debug)]
pub(in crate::listener) struct HandshakeOutcome {
    /// Negotiated protocol; HTTP/1.1 by default (RFC 9113 §3.2).
    pub(in crate::listener) protocol: Protocol,
    /// The verified client certificate.
    pub(in crate::listener) certificate: Option<Rc<ClientCertificate>>,
}

impl Handshakes {
    /// No handshake in progress yet.
    pub fn new(tls: Arc<ListenerTls>, metrics: HandshakeMetrics) -> Self {
        Self {
            tls,
            metrics,
            next: Cell::new(0),
            under_way: RefCell::default(),
        }
    }

    /// Runs the server side of a handshake and counts its outcome; `None` if it failed or exceeded
    /// `patience`.
    pub(in crate::listener) async fn accept(
        self: &Rc<Self>,
        stream: ClientStream,
        patience: Duration,
    ) -> Option<(ClientStream, HandshakeOutcome)> {
        let place = self.enter();
        let acceptor = TlsAcceptor::from(self.tls.current.load_full());
        let outcome = tokio::select! {
            outcome = acceptor.accept(stream) => outcome,
            () = tokio::time::sleep(patience) => {
                self.metrics.timeout.increment(1);
                return None;
            }
            () = place.given_up.notified() => {
                self.metrics.shed.increment(1);
                return None;
            }
        };
        match outcome {
            Ok(stream) => self.settle(Box::new(stream)),
            Err(error) => {
                self.failed(&error);
                None
            }
        }
    }

    fn settle(
        &self,
        stream: Box<TlsStream<ClientStream>>,
    ) -> Option<(ClientStream, HandshakeOutcome)> {
        let session = stream.get_ref().1;
        let chain = session.peer_certificates();
        let certificate = chain
            .and_then(<[_]>::first)
            .map(|der| client::holder(der, SystemTime::now()));
        if let Some(None) = certificate {
            self.metrics.certificate.increment(1);
            tracing::debug!("the client's certificate has expired since its session began");
            return None;
        }
        match session.handshake_kind() {
            Some(HandshakeKind::Resumed) => self.metrics.resumed.increment(1),
            _ => self.metrics.full.increment(1),
        }
        let secured = HandshakeOutcome {
            protocol: match session.alpn_protocol() {
                Some(b"h2") => Protocol::Http2,
                _ => Protocol::Http1,
            },
            certificate: certificate.flatten().map(Rc::new),
        };
        Some((ClientStream::Tls(stream), secured))
    }

    fn failed(&self, error: &io::Error) {
        let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
        let counter = match cause {
            None => &self.metrics.closed,
            Some(Error::NoCertificatesPresented | Error::InvalidCertificate(_)) => {
                &self.metrics.certificate
            }
            Some(Error::AlertReceived(_)) => &self.metrics.refused,
            Some(_) => &self.metrics.failed,
        };
        counter.increment(1);
        tracing::debug!(%error, "handshake failed");
    }

    fn enter(self: &Rc<Self>) -> HandshakePermit {
        let id = self.next.get();
        self.next.set(id + 1);
        let mut under_way = self.under_way.borrow_mut();
        if under_way.len() >= self.tls.settings.max_handshakes
            && let Some((_, oldest)) = under_way.pop_first()
        {
            oldest.notify_one();
        }
        let given_up = Rc::new(Notify::new());
        under_way.insert(id, Rc::clone(&given_up));
        HandshakePermit {
            id,
            given_up,
            handshakes: Rc::clone(self),
        }
    }
}

/// One handshake in progress.
struct HandshakePermit {
    id: u64,
    /// Notified when it must make room.
    given_up: Rc<Notify>,
    handshakes: Rc<Handshakes>,
}

impl Drop for HandshakePermit {
    fn drop(&mut self) {
        self.handshakes.under_way.borrow_mut().remove(&self.id);
    }
}
