//! Returns memory that the process no longer uses to the system.
//!
//! glibc's allocator keeps freed memory: live allocations are spread between the freed ones, so
//! the end of the heap rarely becomes free. `malloc_trim` returns the whole pages between them.
//! [`IdleMemory`] decides when that is worth its cost.

/// Returns freed memory to the system. glibc's allocator otherwise keeps it for later use; other
/// allocators return it on their own. Takes some milliseconds, during which an allocation may wait
/// while one arena is trimmed.
pub(super) fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    {
        #[expect(unsafe_code, reason = "only the C library can trim its heap")]
        unsafe extern "C" {
            /// `malloc_trim(3)`: safe with any argument, at any time, from any thread.
            safe fn malloc_trim(kept_bytes: usize) -> std::ffi::c_int;
        }
        malloc_trim(0);
    }
}

/// Decides when to return freed memory: when the process has more resident memory than it needed
/// before. The pause between two trims doubles while nothing ends, because then the memory is
/// probably in use.
#[derive(Debug)]
pub(super) struct IdleMemory {
    connections: Wave,
    bodies: HighWater,
    /// The lowest resident memory at the start or after a trim.
    floor: Option<u64>,
    /// Calls since the last trim, and the number of calls after which the next may follow.
    calls: u32,
    pause: u32,
}

/// What the process has freed so far, and uses now.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryUse {
    /// Connections that freed their buffers, in total.
    pub(super) released_connections: u64,
    /// Peak bytes of buffered request bodies since the last call, and the bytes in use now.
    pub(super) body_peak: usize,
    pub(super) body_bytes: usize,
}

impl IdleMemory {
    /// Less unneeded memory is not worth a trim.
    const WORTH_IT: u64 = 8 << 20;
    /// Calls between two trims after connections or bodies have ended.
    const MIN_PAUSE: u32 = 5;
    /// Calls between two trims at most.
    const MAX_PAUSE: u32 = 600;

    pub(super) fn new(resident: Option<u64>) -> Self {
        Self {
            connections: Wave::default(),
            bodies: HighWater::default(),
            floor: resident,
            calls: Self::MIN_PAUSE,
            pause: Self::MIN_PAUSE,
        }
    }

    /// Call about once a second. Reads the resident memory only if a trim may follow.
    pub(super) fn is_due(
        &mut self,
        now: MemoryUse,
        resident: impl FnOnce() -> Option<u64>,
    ) -> bool {
        self.calls = self.calls.saturating_add(1);
        let wave_is_over = self.connections.is_over(now.released_connections);
        let bodies_ended = self.bodies.has_fallen(now.body_peak, now.body_bytes);
        if wave_is_over || bodies_ended {
            self.pause = Self::MIN_PAUSE;
        }
        if self.calls < self.pause {
            return false;
        }
        match (self.floor, resident()) {
            (Some(floor), Some(resident)) => resident >= floor.saturating_add(Self::WORTH_IT),
            _ => false,
        }
    }

    /// Call after a trim with the resident memory.
    pub(super) fn trimmed(&mut self, resident: Option<u64>) {
        self.floor = self.floor.min(resident).or(self.floor);
        self.calls = 0;
        self.pause = (self.pause * 2).min(Self::MAX_PAUSE);
    }
}

/// Detects the end of a wave of connections. Their buffers are then free, but fragmented between
/// live allocations and unused until the next wave.
#[derive(Debug, Default)]
struct Wave {
    /// The total at the last call.
    seen: u64,
    /// The total at the end of the last wave.
    ended_at: u64,
}

impl Wave {
    /// Call about once a second with the total number of connections that freed their buffers.
    fn is_over(&mut self, released: u64) -> bool {
        /// Each held about 40 KiB, or far more if it uploaded something.
        const MIN_CONNECTIONS: u64 = 100;
        /// With this many more per second, the wave goes on.
        const RIPPLE: u64 = 50;
        let since = released - self.seen;
        self.seen = released;
        let is_over = since < RIPPLE && released - self.ended_at >= MIN_CONNECTIONS;
        if is_over {
            self.ended_at = released;
        }
        is_over
    }
}

/// Detects when much memory for request bodies was in use and is free again.
#[derive(Debug, Default)]
struct HighWater {
    most: usize,
}

impl HighWater {
    /// Call about once a second with the peak bytes since the last call, and the bytes in use
    /// now.
    fn has_fallen(&mut self, peak: usize, now: usize) -> bool {
        /// A lower peak is not worth a trim.
        const WORTH_IT: usize = 4 << 20;
        self.most = self.most.max(peak);
        let has_fallen = self.most >= WORTH_IT && now <= self.most / 4;
        if has_fallen {
            self.most = now;
        }
        has_fallen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const QUIET: MemoryUse = MemoryUse {
        released_connections: 0,
        body_peak: 0,
        body_bytes: 0,
    };

    /// How many calls it takes until a trim is due.
    fn calls(memory: &mut IdleMemory, resident: u64) -> usize {
        1 + (0..10_000)
            .take_while(|_| !memory.is_due(QUIET, || Some(resident)))
            .count()
    }

    #[test]
    fn memory_that_was_not_needed_before_is_returned_and_more_rarely_if_it_is_in_use() {
        let mut memory = IdleMemory::new(Some(10 * MIB));
        assert_eq!(calls(&mut memory, 17 * MIB), 10_001, "too little");
        assert_eq!(calls(&mut memory, 18 * MIB), 1, "the first at once");
        memory.trimmed(Some(18 * MIB));
        assert_eq!(calls(&mut memory, 18 * MIB), 10);
        memory.trimmed(Some(18 * MIB));
        assert_eq!(calls(&mut memory, 18 * MIB), 20);
        for _ in 0..10 {
            memory.trimmed(Some(18 * MIB));
        }
        assert_eq!(calls(&mut memory, 18 * MIB), 600);
    }

    #[test]
    fn the_end_of_connections_or_bodies_brings_the_next_trim_forward() {
        let ended = [
            MemoryUse {
                released_connections: 200,
                ..QUIET
            },
            MemoryUse {
                body_peak: 8 << 20,
                ..QUIET
            },
        ];
        for ended in ended {
            let mut memory = IdleMemory::new(Some(10 * MIB));
            for _ in 0..10 {
                memory.trimmed(Some(100 * MIB));
            }
            assert!(!memory.is_due(ended, || Some(100 * MIB)));
            let later = MemoryUse {
                body_peak: 0,
                ..ended
            };
            let due = (0..600).position(|_| memory.is_due(later, || Some(100 * MIB)));
            assert!(due.is_some_and(|calls| calls < 5), "{due:?}");
            memory.trimmed(Some(9 * MIB));
            assert!(!memory.is_due(later, || Some(100 * MIB)), "just done");
        }
    }

    #[test]
    fn memory_that_cannot_be_read_is_left_alone() {
        assert_eq!(calls(&mut IdleMemory::new(None), 100 * MIB), 10_001);
        let mut memory = IdleMemory::new(Some(MIB));
        assert!(!memory.is_due(QUIET, || None));
        memory.trimmed(None);
        assert_eq!(memory.floor, Some(MIB));
    }

    #[test]
    fn a_wave_is_over_when_it_was_high_and_has_passed_and_then_once() {
        let mut wave = Wave::default();
        let mut look = |released| wave.is_over(released);
        assert!(!look(40), "too few");
        assert!(!look(10_000), "it continues");
        assert!(!look(10_050), "still");
        assert!(look(10_060), "it is over");
        assert!(!look(10_060), "nothing new");
        assert!(!look(10_100) && !look(10_140), "a trickle");
        assert!(!look(11_000));
        assert!(look(11_000));
    }

    #[test]
    fn memory_of_bodies_has_fallen_once_when_it_was_high_and_most_is_free() {
        let mut water = HighWater::default();
        assert!(!water.has_fallen(1 << 20, 0), "too little");
        assert!(!water.has_fallen(8 << 20, 4 << 20), "still in use");
        assert!(!water.has_fallen(4 << 20, 3 << 20), "still");
        assert!(water.has_fallen(3 << 20, 1 << 20));
        assert!(!water.has_fallen(1 << 20, 0), "nothing new");
    }
}
