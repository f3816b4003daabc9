//! Sockets opened by the service manager: socket activation (sd_listen_fds(3)).
//!
//! `LISTEN_FDS` sockets start at descriptor 3, for the process in `LISTEN_PID`; `LISTEN_FDNAMES`
//! names them. The service manager keeps them open. A connection that arrives while no gateway runs
//! waits in the socket's queue, so a restart refuses no connection.

use std::{io, os::fd::OwnedFd, sync::OnceLock};

use socket2::{Socket, Type};

/// The first inherited descriptor.
const FIRST: i32 = 3;
/// Sanity bound, above that of any unit.
const MAX_SOCKETS: i32 = 1024;

/// Taken once per process: a descriptor closed here could not be reopened.
static HANDED_OVER: OnceLock<Vec<(String, Socket)>> = OnceLock::new();

/// Duplicates of the sockets with this name, in order; at least one.
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
            let why = "the inherited descriptor is not a listening stream socket; write ListenStream= and Accept=no";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        socket.set_nonblocking(true)?;
    }
    Ok(copies)
}

fn missing(all: &[(String, Socket)]) -> String {
    if all.is_empty() {
        return "no socket was inherited; start the .socket unit instead of the program itself"
            .to_owned();
    }
    let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    format!(
        "no inherited socket has this name, only {}; see FileDescriptorName=",
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

/// The socket of an open descriptor.
fn adopt(descriptor: i32) -> Option<Socket> {
    std::fs::symlink_metadata(format!("/proc/self/fd/{descriptor}")).ok()?;
    #[expect(
        unsafe_code,
        reason = "the standard library has no safe way to adopt a descriptor"
    )]
    // SAFETY: the descriptor is open and nothing else owns it. The service manager opened it for
    // this process (LISTEN_PID) before any other descriptor, so no other code can have received its
    // number. OnceLock ensures that it is taken once.
    let descriptor = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(descriptor) };
    let socket = Socket::from(descriptor);
    let _ = socket.set_cloexec(true);
    Some(socket)
}
