//! Sockets that the service manager opened before this process began, and keeps: socket activation (sd_listen_fds(3)).
//!
//! `LISTEN_FDS` of them stand at the descriptors from 3 on, for the process that `LISTEN_PID` names; `LISTEN_FDNAMES` calls them by
//! name. A connection that comes while no gateway runs waits in such a socket for the next one: a restart refuses nobody.

use std::{io, os::fd::OwnedFd, sync::OnceLock};

use socket2::{Socket, Type};

/// The first descriptor that is handed over.
const FIRST: i32 = 3;
/// More than any unit has.
const MAX_SOCKETS: i32 = 1024;

/// Taken once for the whole process: what is closed here could never be had again.
static HANDED_OVER: OnceLock<Vec<(String, Socket)>> = OnceLock::new();

/// Copies of the sockets of this name, in their order; at least one.
pub(super) fn named(name: &str) -> io::Result<Vec<Socket>> {
    let all = HANDED_OVER.get_or_init(take);
    let of_name = all.iter().filter(|(of, _)| of == name);
    let copies: Vec<Socket> = of_name
        .map(|(_, socket)| socket.try_clone())
        .collect::<io::Result<_>>()?;
    if copies.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, missing(all)));
    }
    for socket in &copies {
        if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
            let why = "what was handed over is not a listening stream socket; write ListenStream= and Accept=no";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        socket.set_nonblocking(true)?;
    }
    Ok(copies)
}

fn missing(all: &[(String, Socket)]) -> String {
    if all.is_empty() {
        return "no socket was handed over; start the .socket unit, not the program by itself"
            .to_owned();
    }
    let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    format!(
        "no socket of this name was handed over, but {}; see FileDescriptorName=",
        names.join(", ")
    )
}

fn take() -> Vec<(String, Socket)> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let number = |name: &str| variable(name).parse::<i32>().ok();
    let is_ours = u32::try_from(number("LISTEN_PID").unwrap_or(0)) == Ok(std::process::id());
    let count = number("LISTEN_FDS").filter(|count| is_ours && (1..=MAX_SOCKETS).contains(count));
    let names = variable("LISTEN_FDNAMES");
    let mut names = names.split(':');
    (FIRST..FIRST + count.unwrap_or(0))
        .filter_map(|descriptor| {
            let name = names.next().filter(|name| !name.is_empty());
            Some((name.unwrap_or("unknown").to_owned(), adopt(descriptor)?))
        })
        .collect()
}

/// The socket of a descriptor that is open.
fn adopt(descriptor: i32) -> Option<Socket> {
    std::fs::symlink_metadata(format!("/proc/self/fd/{descriptor}")).ok()?;
    #[expect(
        unsafe_code,
        reason = "the standard library has no other way to take up a descriptor"
    )]
    // SAFETY: it is open, and nobody else owns it: the service manager left it to this very process (LISTEN_PID), where it was
    // open before any other descriptor was, so that nothing here can have been given its number; it is taken once (OnceLock).
    let descriptor = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(descriptor) };
    let socket = Socket::from(descriptor);
    let _ = socket.set_cloexec(true);
    Some(socket)
}
