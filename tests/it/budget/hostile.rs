//! A hostile server in place of Redis: whatever it answers, requests are decided and memory stays
//! bounded.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use super::waiting;
use crate::support::{
    Gateway, Request,
    wait::{lock, time_passes, within},
};

fn shared_at(url: &str, limit: &str) -> Gateway {
    waiting("200ms", &format!("url = {url:?}"), limit)
}

/// Answers `+OK` to everything except script calls by digest, which go to `answer`.
struct Impostor {
    url: String,
    /// Connections closed by the gateway.
    closed: Arc<Mutex<usize>>,
}

impl Impostor {
    fn answering(
        answer: impl Fn(&mut TcpStream) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let url = format!("redis://{}", socket.local_addr().expect("it is bound"));
        let closed = Arc::new(Mutex::new(0));
        let (counted, answer) = (Arc::clone(&closed), Arc::new(answer));
        thread::spawn(move || {
            for stream in socket.incoming().flatten() {
                let (counted, answer) = (Arc::clone(&counted), Arc::clone(&answer));
                thread::spawn(move || {
                    let _ = serve(stream, &*answer);
                    *lock(&counted) += 1;
                });
            }
        });
        Impostor { url, closed }
    }
}

fn serve(
    mut stream: TcpStream,
    answer: &impl Fn(&mut TcpStream) -> io::Result<()>,
) -> io::Result<()> {
    let mut commands = BufReader::new(stream.try_clone()?);
    loop {
        let command = read_command(&mut commands)?;
        let is_count = command.iter().any(|word| word.ends_with(b":gateways"));
        if command.first().is_some_and(|word| word == b"EVALSHA") && !is_count {
            answer(&mut stream)?;
        } else if is_count {
            stream.write_all(b"*2\r\n:2\r\n:0\r\n")?;
        } else {
            stream.write_all(b"+OK\r\n")?;
        }
    }
}

fn read_command(from: &mut impl BufRead) -> io::Result<Vec<Vec<u8>>> {
    let mut number = || -> io::Result<usize> {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let digits = line.trim_start_matches(['*', '$']).trim();
        digits.parse().map_err(io::Error::other)
    };
    let words = number()?;
    let mut command = Vec::new();
    for _ in 0..words {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let length: usize = line
            .trim_start_matches('$')
            .trim()
            .parse()
            .map_err(io::Error::other)?;
        let mut word = vec![0; length + 2];
        from.read_exact(&mut word)?;
        word.truncate(length);
        command.push(word);
    }
    Ok(command)
}

const LIMITS: [&str; 4] = [
    "rate = \"5/s\"\nburst = 5",
    "rate = \"5/s\"\nalgorithm = \"sliding_window\"",
    "rate = \"5/s\"\nalgorithm = \"sliding_log\"\nsync = \"strict\"",
    "algorithm = \"concurrency\"\nlimit = 5",
];

#[test]
fn numbers_at_the_ends_of_what_there_is_decide_requests_and_break_nothing() {
    let (least, most) = (i64::MIN, i64::MAX);
    let answers: Vec<[i64; 10]> = vec![
        [most; 10],
        [least; 10],
        [-1; 10],
        [0; 10],
        [1, 0, 0, most, most, 0, 0, most, 0, 0],
        [most, most, 4_294_967_295, most, 0, most, 1, 0, most, most],
        [0, most, 4_294_967_295, most, most, 0, 0, 0, 0, most],
        [0, 0, 4_294_967_296, 0, 0, 0, 0, 0, 0, 0],
        [1, 3, 7, 0, 0, 0, 65_537, 0, most, 0],
        [0, 0, 0, 0, 0, most, 0, 0, 0, 0],
    ];
    for limit in LIMITS {
        for numbers in &answers {
            let text = numbers.iter().map(|number| format!(":{number}\r\n"));
            let reply = format!("*10\r\n{}", text.collect::<String>());
            let impostor = Impostor::answering(move |stream| stream.write_all(reply.as_bytes()));
            let gateway = shared_at(&impostor.url, limit);
            for _ in 0..12 {
                let response = gateway.get("/");
                assert!([200, 429].contains(&response.status), "{limit} {numbers:?}");
            }
            assert_eq!(
                gateway.metric("tidegate_panics_total"),
                0.0,
                "{limit} {numbers:?}"
            );
        }
    }
}

#[test]
fn replies_of_another_kind_are_failures_and_the_limit_goes_on_alone() {
    for reply in [
        "$5\r\nhello\r\n",
        "*0\r\n",
        "*-1\r\n",
        "*10\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n",
        "*8\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n",
        "%1\r\n+a\r\n:1\r\n",
        ",inf\r\n",
        "(99999999999999999999999999\r\n",
        "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
        "-ERR user_script:1: attempt to perform arithmetic on a nil value\r\n",
        "-MOVED 99999 256.1.1.1:99999999\r\n",
        "-ASK 1 :0\r\n",
        "-\r\n",
        ":\r\n",
        "*99999999999999999999\r\n",
    ] {
        let impostor = Impostor::answering(move |stream| stream.write_all(reply.as_bytes()));
        let limit = "rate = \"5/h\"\nburst = 4\nsync = \"strict\"";
        let gateway = shared_at(&impostor.url, limit);
        let statuses = gateway.statuses(&Request::get("/"), 12);
        let passed = statuses.iter().filter(|&&status| status == 200).count();
        assert!(
            statuses.iter().all(|status| [200, 429].contains(status)),
            "{reply:?}"
        );
        // half of four for each of two gateways, or for the only known one
        assert!((1..=2).contains(&passed), "{reply:?}: {statuses:?}");
        assert_eq!(gateway.metric("tidegate_panics_total"), 0.0, "{reply:?}");
    }
}

#[test]
fn a_reply_without_end_is_cut_off_and_its_memory_is_given_back() {
    // as fast as the gateway reads, up to a bound that no test should reach
    let impostor = Impostor::answering(|stream| {
        stream.write_all(b"$68719476736\r\n")?;
        let chunk = [b'x'; 64 * 1024];
        for _ in 0..64 * 1024 {
            stream.write_all(&chunk)?;
            time_passes(Duration::from_millis(2), "the impostor paces its reply");
        }
        Ok(())
    });
    let gateway: Gateway = shared_at(
        &impostor.url,
        "rate = \"1000/s\"\nsync = \"strict\"\non_redis_down = \"open\"",
    );
    for _ in 0..20 {
        assert_eq!(gateway.get("/").status, 200);
    }
    // twenty timeouts of 200 ms after the last call, even while the reply continues
    within(Duration::from_secs(30), "a connection to be closed", || {
        assert_eq!(gateway.get("/").status, 200);
        match *lock(&impostor.closed) {
            0 => Err("none is".to_owned()),
            _ => Ok(()),
        }
    });
    let peak = gateway.peak_memory_bytes();
    assert!(peak < 1 << 30, "{peak} bytes");
}

#[test]
fn a_redis_that_lets_nobody_in_is_named_with_its_own_words() {
    const WORDS: &[u8] = b"-DENIED Redis is running in protected mode because no password is set. In this mode connections are only accepted from the loopback interface.\r\n";
    let socket = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    let url = format!("redis://{}", socket.local_addr().expect("it is bound"));
    thread::spawn(move || {
        for mut stream in socket.incoming().flatten() {
            // as Redis does: data from the client resets the connection
            let _ = stream.write_all(WORDS);
        }
    });
    let gateway = shared_at(&url, "rate = \"5/h\"\nburst = 5\non_redis_down = \"local\"");
    assert_eq!(gateway.get("/").status, 200);
    within(
        Duration::from_secs(10),
        "the log to show the reason",
        || {
            let log = gateway.stderr();
            match log
                .contains("DENIED Redis is running in protected mode because no password is set\"")
            {
                true => Ok(()),
                false => Err(log),
            }
        },
    );
}
