//! Process metrics, read from `/proc` at each scrape.
//!
//! The registry's counters are integers, but CPU time is not, so these are rendered separately. The
//! names are those of Prometheus client libraries. A value that cannot be read is omitted, and on
//! systems other than Linux all are.

use std::{fmt::Write, fs};

/// Kernel ticks per second: 100 in user space on every Linux architecture that Rust supports.
const TICKS_PER_SECOND: f64 = 100.0;

/// Name, type, unit, help.
pub(super) const ALL: [(&str, &str, &str, &str); 7] = [
    (
        "process_cpu_seconds_total",
        "counter",
        "seconds",
        "CPU time used, user and system.",
    ),
    (
        "process_resident_memory_bytes",
        "gauge",
        "bytes",
        "Resident memory.",
    ),
    (
        "process_virtual_memory_bytes",
        "gauge",
        "bytes",
        "Reserved address space.",
    ),
    (
        "process_open_fds",
        "gauge",
        "count",
        "Open file descriptors.",
    ),
    (
        "process_max_fds",
        "gauge",
        "count",
        "Maximum of open file descriptors.",
    ),
    ("process_threads", "gauge", "count", "Threads."),
    (
        "process_start_time_seconds",
        "gauge",
        "seconds",
        "Start of the process, in seconds since 1970.",
    ),
];

/// Appends the readable values to `text`, in the Prometheus text format.
pub(super) fn render(text: &mut String) {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kernel = fs::read_to_string("/proc/stat").unwrap_or_default();
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    // minus the descriptor that reads the directory
    let open = fs::read_dir("/proc/self/fd")
        .ok()
        .map(|entries| entries.count().saturating_sub(1) as f64);
    let values = [
        cpu_seconds(&stat),
        kibibytes(&status, "VmRSS:"),
        kibibytes(&status, "VmSize:"),
        open,
        number_after(&limits, "Max open files"),
        number_after(&status, "Threads:"),
        start_seconds(&stat, &kernel),
    ];
    for ((name, kind, _, help), value) in ALL.iter().zip(values) {
        if let Some(value) = value {
            // writing to a String cannot fail
            let _ = write!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n\n"
            );
        }
    }
}

/// Resident memory of the process; `None` where it cannot be read.
pub fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    kibibytes(&status, "VmRSS:").map(|bytes| bytes as u64)
}

/// Field `number` of proc_pid_stat(5), counted from 1. The second field may contain spaces and
/// parentheses.
fn stat_field(stat: &str, number: usize) -> Option<f64> {
    let after_name = stat.rsplit_once(')')?.1;
    after_name
        .split_ascii_whitespace()
        .nth(number.checked_sub(3)?)?
        .parse()
        .ok()
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    Some((stat_field(stat, 14)? + stat_field(stat, 15)?) / TICKS_PER_SECOND)
}

fn start_seconds(stat: &str, kernel: &str) -> Option<f64> {
    Some(number_after(kernel, "btime")? + stat_field(stat, 22)? / TICKS_PER_SECOND)
}

fn kibibytes(status: &str, name: &str) -> Option<f64> {
    number_after(status, name).map(|kib| kib * 1024.0)
}

/// The first word after `name` on its line.
fn number_after(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_ascii_whitespace()
        .next()?
        .parse()
        .ok()
        .filter(|value: &f64| value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read() {
        assert!(resident_bytes().is_none_or(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn fields_are_found_behind_a_hostile_process_name() {
        let stat = "7 (a) b) (c) S 1 7 7 0 -1 4194304 1 0 0 0 250 150 0 0 20 0 3 0 6000 1 1";
        assert_eq!(cpu_seconds(stat), Some(4.0));
        assert_eq!(
            start_seconds(stat, "cpu 1 2\nbtime 1700000000\n"),
            Some(1_700_000_060.0)
        );
        assert_eq!(
            kibibytes("Name:\tx\nVmRSS:\t    12 kB\n", "VmRSS:"),
            Some(12_288.0)
        );
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        assert_eq!(cpu_seconds(""), None);
        assert_eq!(
            number_after(
                "Max open files  unlimited unlimited files",
                "Max open files"
            ),
            None
        );
        assert_eq!(number_after("btime", "btime"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_plausible_figures() {
        let mut text = String::new();
        render(&mut text);
        let value = |name: &str| -> f64 {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .expect("the metric is present");
            line.trim().parse().expect("it is a number")
        };
        assert!(value("process_resident_memory_bytes ") > 65_536.0);
        assert!(value("process_open_fds ") >= 1.0);
        assert!(value("process_threads ") >= 1.0);
        assert!(value("process_start_time_seconds ") > 1_600_000_000.0);
    }
}
