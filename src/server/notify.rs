//! Notifies the service manager (sd_notify(3)) when the gateway is ready, reloads or stops.
//!
//! Without a manager `NOTIFY_SOCKET` is unset, and nothing is sent. A failed send costs one debug
//! line.

use std::{
    env, io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// The gateway serves requests.
pub(super) const READY: &str = "READY=1\nSTATUS=serving";
/// A reload has started; [`READY`] follows, whether it succeeds or not.
pub(super) const RELOADING: &str = "RELOADING=1\nSTATUS=reloading the configuration";
/// The gateway finishes requests in flight, then the process ends.
pub(super) const STOPPING: &str = "STOPPING=1\nSTATUS=finishing requests in flight";

pub(super) fn notify(state: &str) {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let told = address(path.as_bytes()).and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        // do not wait for a manager whose queue is full
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state.as_bytes(), &address)
    });
    if let Err(error) = told {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

/// A socket path, or an abstract socket name after `@`.
fn address(text: &[u8]) -> io::Result<SocketAddr> {
    match text.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(text)),
    }
}
