//! The client of a connection.

use std::{cell::RefCell, fmt, net::IpAddr, rc::Rc};

use http::{HeaderMap, StatusCode};

use super::{
    abuse::AbuseReason, clock::Clock, handover::Takeover, interim::Interim,
    settings::ListenerSettings,
};
use crate::identity::ClientCertificate;

/// The client of a connection, and the bounds that apply to it.
pub struct Peer {
    /// The client's address: the socket's, or that of a PROXY header.
    pub ip: IpAddr,
    /// The listener's settings.
    pub listener: Rc<ListenerSettings>,
    /// The verified client certificate.
    pub certificate: Option<Rc<ClientCertificate>>,
    pub(super) clock: Rc<Clock>,
    pub(super) interim: Rc<Interim>,
    takeover: RefCell<Option<Takeover>>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("ip", &self.ip)
            .finish_non_exhaustive()
    }
}

impl Peer {
    pub(super) fn new(
        ip: IpAddr,
        listener: Rc<ListenerSettings>,
        certificate: Option<Rc<ClientCertificate>>,
        clock: Clock,
    ) -> Self {
        Self {
            ip,
            listener,
            certificate,
            clock: Rc::new(clock),
            interim: Rc::default(),
            takeover: RefCell::default(),
        }
    }

    /// A peer without a connection, to explain hypothetical requests.
    pub fn described(
        ip: IpAddr,
        listener: Rc<ListenerSettings>,
        certificate: Option<Rc<ClientCertificate>>,
    ) -> Self {
        let clock = Clock::new(listener.header_timeout, listener.idle_timeout);
        Self::new(ip, listener, certificate, clock)
    }

    /// `http` or `https`, as the client used.
    pub fn scheme(&self) -> &'static str {
        match self.listener.tls {
            Some(_) => "https",
            None => "http",
        }
    }

    /// Hands the connection to `to` once the 101 response has been sent. HTTP/1.1 only.
    pub fn upgrade_to(&self, to: Takeover) {
        self.takeover.replace(Some(to));
    }

    /// Takes the handler that was passed to `upgrade_to`.
    pub(super) fn take_over(&self) -> Option<Takeover> {
        self.takeover.take()
    }

    /// Queues an interim response of the upstream for the client, before the final one. `false` if
    /// there is no room. HTTP/1.1 only: older clients do not know them, and the h2 crate cannot
    /// send them.
    pub fn pass_on_interim(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        self.interim.push(status, headers)
    }

    /// Sets whether a client that closes its side now has left: the gateway awaits more of its
    /// request, or the request waits in a queue. Otherwise the client may only have finished
    /// sending, and still gets its response if that comes soon. HTTP/1 only.
    pub fn needs_client(&self, needs: bool) {
        self.clock.needs_client(needs);
    }

    /// Why an HTTP/2 stream failed, if its connection was closed early.
    pub(super) fn why_cut(&self, error: &h2::Error) -> Option<AbuseReason> {
        self.clock.why_cut(error)
    }

    /// The response precedes the end of the request body: close the connection so that the client
    /// can still read it. HTTP/1 only; HTTP/2 resets the stream.
    pub fn leave_body_unread(&self) {
        self.clock.leave_body_unread();
    }
}
