//! Idle connections (parked): one task waits for all of them.
//!
//! ```text
//! first byte ─▶ own task ──250 ms of silence──▶ parked ──readable, or deadline──▶ own task again …
//! ```
//!
//! A parked connection is a table entry without task, timer or runtime registration, which saves
//! about 1 KiB each. A separate poller (epoll, kqueue) watches its descriptor; the runtime sees
//! that poller as one descriptor. Cost: four system calls per parking, none while the connection is
//! busy.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::BinaryHeap,
    fmt,
    future::{Future, pending},
    io,
    os::fd::AsRawFd,
    pin::pin,
    time::Duration,
};

use mio::{Events, Interest, Poll, Registry, Token, unix::SourceFd};
use slab::Slab;
use tokio::{
    io::{Interest as Watched, unix::AsyncFd},
    sync::Notify,
    time::{Instant, sleep_until},
};

/// Most events fetched at once.
const AT_ONCE: usize = 256;

/// The idle connections of one worker.
pub(super) struct IdleConnections<T> {
    registry: Registry,
    places: RefCell<IdleSlots<T>>,
    /// A new deadline precedes all others.
    sooner: Notify,
}

/// The poller of the parked descriptors: for [`IdleConnections::watch`].
pub(super) struct IdlePoller(AsyncFd<Poll>);

struct IdleSlots<T> {
    taken: Slab<(Instant, T)>,
    /// Earliest deadline first. May contain slots that have been freed since.
    deadlines: BinaryHeap<Reverse<(Instant, usize)>>,
}

impl<T> fmt::Debug for IdleConnections<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parked = self.places.borrow().taken.len();
        f.debug_struct("IdleConnections")
            .field("parked", &parked)
            .finish()
    }
}

impl<T: AsRawFd> IdleConnections<T> {
    /// An empty table. Uses two descriptors, and fails if none are left. Needs a runtime.
    pub(super) fn new() -> io::Result<(Self, IdlePoller)> {
        let poll = Poll::new()?;
        let lot = Self {
            registry: poll.registry().try_clone()?,
            places: RefCell::default(),
            sooner: Notify::new(),
        };
        #[expect(unsafe_code, reason = "tokio has no safe way to watch a `Poll`")]
        // SAFETY: the descriptor stays open as long as the `Poll` lives, and the `Poll` is never
        // replaced
        let watched = unsafe { AsyncFd::register_with_interest(poll, Watched::READABLE) };
        Ok((lot, IdlePoller(watched?)))
    }

    /// Parks `what` until its descriptor is readable or `until` has passed. Drops it if the system
    /// is out of resources.
    pub(super) fn park(&self, what: T, until: Instant) -> io::Result<()> {
        let mut places = self.places.borrow_mut();
        let descriptor = what.as_raw_fd();
        let token = Token(places.taken.vacant_key());
        let registered =
            self.registry
                .register(&mut SourceFd(&descriptor), token, Interest::READABLE);
        registered?;
        if places.first().is_none_or(|first| until < first) {
            self.sooner.notify_one();
        }
        places.take(what, until);
        Ok(())
    }

    /// Returns connections that are readable or due; once `ended` resolves, all of them.
    pub(super) async fn watch(
        &self,
        watch: IdlePoller,
        ended: impl Future<Output = ()>,
        hand_out: impl Fn(T),
    ) {
        let (mut watch, mut ended) = (watch, pin!(ended));
        let mut events = Events::with_capacity(AT_ONCE);
        loop {
            let first = self.places.borrow_mut().first();
            tokio::select! {
                readable = watch.next(&mut events) => match readable {
                    Ok(()) => events.iter().for_each(|event| self.leave(event.token().0, &hand_out)),
                    // the runtime is shutting down
                    Err(_) => return,
                },
                () = time(first) => while let Some(key) = self.overdue() {
                    self.leave(key, &hand_out);
                },
                () = self.sooner.notified() => {}
                () = &mut ended => break,
            }
        }
        let all: Vec<_> = self.places.borrow().keys();
        all.into_iter().for_each(|key| self.leave(key, &hand_out));
    }

    fn overdue(&self) -> Option<usize> {
        self.places.borrow_mut().overdue(Instant::now())
    }

    fn leave(&self, key: usize, hand_out: impl Fn(T)) {
        let left = self.places.borrow_mut().leave(key);
        if let Some(what) = left {
            // it is registered, so this cannot fail
            let _ = self.registry.deregister(&mut SourceFd(&what.as_raw_fd()));
            hand_out(what);
        }
    }
}

async fn time(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

impl IdlePoller {
    /// Waits until at least one descriptor is readable.
    async fn next(&mut self, events: &mut Events) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable_mut().await?;
            match ready.get_inner_mut().poll(events, Some(Duration::ZERO)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                outcome => outcome?,
            }
            let count = events.iter().count();
            if count < AT_ONCE {
                ready.clear_ready();
            }
            if count > 0 {
                return Ok(());
            }
        }
    }
}

impl<T> Default for IdleSlots<T> {
    fn default() -> Self {
        Self {
            taken: Slab::new(),
            deadlines: BinaryHeap::new(),
        }
    }
}

impl<T> IdleSlots<T> {
    fn take(&mut self, what: T, until: Instant) {
        let key = self.taken.insert((until, what));
        self.deadlines.push(Reverse((until, key)));
        // most connections leave before their deadline
        if self.deadlines.len() > 2 * self.taken.len() + AT_ONCE {
            let current = self.taken.iter();
            self.deadlines = current
                .map(|(key, (until, _))| Reverse((*until, key)))
                .collect();
        }
    }

    fn leave(&mut self, key: usize) -> Option<T> {
        let (_, what) = self.taken.try_remove(key)?;
        if self.taken.is_empty() {
            // free the memory, too
            *self = Self::default();
        }
        Some(what)
    }

    fn keys(&self) -> Vec<usize> {
        self.taken.iter().map(|(key, _)| key).collect()
    }

    /// The earliest deadline.
    fn first(&mut self) -> Option<Instant> {
        while let Some(&Reverse((until, key))) = self.deadlines.peek() {
            if self.taken.get(key).is_some_and(|(its, _)| *its == until) {
                return Some(until);
            }
            self.deadlines.pop();
        }
        None
    }

    /// A slot whose deadline has passed.
    fn overdue(&mut self, now: Instant) -> Option<usize> {
        let first = self.first()?;
        let Reverse((_, key)) = self.deadlines.peek()?;
        (first <= now).then_some(*key)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        os::{fd::RawFd, unix::net::UnixStream},
    };

    use super::*;

    const LATER: Duration = Duration::from_secs(3600);

    /// Watches until the given number were returned; returns them in order.
    async fn handed_out(
        lot: &IdleConnections<UnixStream>,
        watch: &mut Option<IdlePoller>,
        count: usize,
        ended: impl Future<Output = ()>,
    ) -> Vec<RawFd> {
        let seen = RefCell::new(Vec::new());
        let enough = Notify::new();
        let hand_out = |socket: UnixStream| {
            seen.borrow_mut().push(socket.as_raw_fd());
            if seen.borrow().len() == count {
                enough.notify_one();
            }
        };
        let watch = watch.take().expect("once for each test");
        tokio::select! {
            () = enough.notified() => {}
            () = lot.watch(watch, ended, hand_out) => {}
        }
        seen.take()
    }

    struct Closed;

    impl AsRawFd for Closed {
        fn as_raw_fd(&self) -> RawFd {
            -1
        }
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(test);
    }

    fn sockets() -> [(UnixStream, UnixStream); 3] {
        std::array::from_fn(|_| UnixStream::pair().expect("sockets"))
    }

    #[test]
    fn whoever_can_be_read_comes_out_and_the_others_stay() {
        run(async {
            let (lot, watch) = IdleConnections::new().expect("descriptors");
            let [(a, _near), (b, mut far), (c, gone)] = sockets();
            let readable = [b.as_raw_fd(), c.as_raw_fd()];
            for socket in [a, b, c] {
                lot.park(socket, Instant::now() + LATER).expect("room");
            }
            far.write_all(b"G").expect("open");
            drop(gone);
            let mut out = handed_out(&lot, &mut Some(watch), 2, pending()).await;
            out.sort_unstable();
            assert_eq!(out, readable);
            assert_eq!(lot.places.borrow().taken.len(), 1);
        });
    }

    #[test]
    fn whose_time_has_come_comes_out_the_earliest_first() {
        run(async {
            let (lot, watch) = IdleConnections::new().expect("descriptors");
            let [(a, _a), (b, _b), (c, _c)] = sockets();
            let due = [b.as_raw_fd(), a.as_raw_fd()];
            let after = |millis| Instant::now() + Duration::from_millis(millis);
            lot.park(c, Instant::now() + LATER).expect("room");
            lot.park(a, after(40)).expect("room");
            lot.park(b, after(20)).expect("room");
            let out = handed_out(&lot, &mut Some(watch), 2, pending()).await;
            assert_eq!(out, due);
        });
    }

    #[test]
    fn one_that_is_parked_while_others_are_watched_is_watched_too() {
        run(async {
            let (lot, watch) = IdleConnections::new().expect("descriptors");
            let [(a, _a), (b, _b), _] = sockets();
            let due = b.as_raw_fd();
            lot.park(a, Instant::now() + LATER).expect("room");
            let parked_later = async {
                tokio::task::yield_now().await;
                let soon = Instant::now() + Duration::from_millis(5);
                lot.park(b, soon).expect("room");
            };
            let mut watch = Some(watch);
            let watching = handed_out(&lot, &mut watch, 1, pending());
            let (out, ()) = tokio::join!(watching, parked_later);
            assert_eq!(out, [due]);
        });
    }

    #[test]
    fn in_the_end_all_come_out() {
        run(async {
            let (lot, watch) = IdleConnections::new().expect("descriptors");
            let [(a, _a), (b, _b), (c, _c)] = sockets();
            for socket in [a, b, c] {
                lot.park(socket, Instant::now() + LATER).expect("room");
            }
            let out = handed_out(&lot, &mut Some(watch), 4, async {}).await;
            assert_eq!(out.len(), 3);
            assert!(lot.places.borrow().taken.is_empty());
        });
    }

    #[test]
    fn one_that_cannot_be_watched_is_dropped() {
        run(async {
            let (lot, _watch) = IdleConnections::new().expect("descriptors");
            assert!(lot.park(Closed, Instant::now() + LATER).is_err());
            assert!(lot.places.borrow().taken.is_empty());
        });
    }

    #[test]
    fn places_that_were_left_take_no_room() {
        let (now, mut places) = (Instant::now(), IdleSlots::default());
        places.take("stays", now + LATER * 2);
        for second in 0..10_000 {
            let before = places.taken.vacant_key();
            places.take("leaves", now + Duration::from_secs(second));
            assert_eq!(places.leave(before), Some("leaves"));
        }
        assert!(places.deadlines.len() <= 2 + AT_ONCE + 1);
        assert_eq!(places.first(), Some(now + LATER * 2));
        assert_eq!(places.overdue(now + LATER), None);
        assert_eq!(places.overdue(now + LATER * 2), Some(0));
        assert_eq!(places.leave(0), Some("stays"));
        assert_eq!(places.leave(0), None);
        assert_eq!(places.taken.capacity() + places.deadlines.capacity(), 0);
    }
}
