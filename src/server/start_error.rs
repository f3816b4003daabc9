//! Why the gateway did not start, and what to do about it.

use std::io;

use crate::listener;

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address could not be bound.
    #[error("cannot listen on {address}: {error}{}", hint(error))]
    Bind {
        /// The address as configured.
        address: String,
        /// The error from the system.
        error: io::Error,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] listener::tls::SetupError),
    /// The configuration cannot be applied.
    #[error(transparent)]
    Gateway(#[from] crate::gateway::PlanError),
    /// The system could not create a thread, a runtime or a signal handler.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// The next step for a failed bind.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; `ss -ltnp` shows the process that has it: configure another address, or replace a running gateway with --beside"
        }
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need a privilege (CAP_NET_BIND_SERVICE)"
        }
        io::ErrorKind::AddrNotAvailable => "; no interface of this machine has that address",
        _ => "",
    }
}
