//! What the service manager is told (sd_notify(3)): that the gateway is ready, reloads, or is about to end.
//!
//! Where no manager asks, `NOTIFY_SOCKET` is not set and nothing is said. One that does not listen costs a debug line.

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

/// Requests are served.
pub(super) const READY: &str = "READY=1\nSTATUS=serving";
/// Another configuration is read; [`READY`] follows, whatever comes of it.
pub(super) const RELOADING: &str = "RELOADING=1\nSTATUS=reading the configuration again";
/// What is in flight is finished, then the process ends.
pub(super) const STOPPING: &str = "STOPPING=1\nSTATUS=finishing what is in flight";

pub(super) fn tell(state: &str) {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let told = address(path.as_bytes()).and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        // a manager whose queue is full is no reason to wait
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state.as_bytes(), &address)
    });
    if let Err(error) = told {
        tracing::debug!(%error, "the service manager could not be told");
    }
}

/// A path, or a name behind `@` that is in no folder.
fn address(text: &[u8]) -> io::Result<SocketAddr> {
    match text.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(text)),
    }
}
