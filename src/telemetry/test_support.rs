//! Test support: captures written text and counts.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Captures everything that is written to any of its clones.
#[derive(Clone, Default)]
pub(super) struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    pub(super) fn text(&self) -> String {
        let bytes = self
            .0
            .lock()
            .expect("no test panics while holding it")
            .clone();
        String::from_utf8(bytes).expect("lines are UTF-8")
    }
}

impl io::Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .expect("no test panics while holding it")
            .extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A counter whose value tests can read.
#[derive(Debug, Default)]
pub(super) struct ReadableCounter(AtomicU64);

impl ReadableCounter {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl metrics::CounterFn for ReadableCounter {
    fn increment(&self, value: u64) {
        self.0.fetch_add(value, Relaxed);
    }

    fn absolute(&self, value: u64) {
        self.0.fetch_max(value, Relaxed);
    }
}
