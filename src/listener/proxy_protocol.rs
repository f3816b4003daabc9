//! The PROXY protocol, versions 1 and 2: a TCP load balancer prepends the address of its client.
//!
//! A listener either requires the header or never looks for it. Guessing would let every client
//! forge one (HAProxy's proxy-protocol.txt §2). The header precedes everything else, even TLS. No
//! byte beyond it is read: [`parse`] returns the minimum number of bytes still missing, and exactly
//! that many are read next. That takes two reads for version 2. Version 1 has no length, so finding
//! its end takes a few more.
//!
//! ```text
//! accept ─▶ is the peer trusted? ─▶ header, within header_timeout ─▶ TLS, HTTP with its source
//! ```
//!
//! The source replaces the socket's peer: forwarding headers are trusted if *it* is a trusted
//! proxy.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::io::{AsyncRead, ReadBuf};

use super::drain::ConnectionGuard;
use crate::identity::TrustedProxies;

/// Whether connections begin with a PROXY header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProxyProtocol {
    /// No header. One that arrives is invalid HTTP.
    #[default]
    Off,
    /// A header is required, and only these peers may connect.
    Required(Arc<TrustedProxies>),
}

/// Longest header: addresses and a few KiB of TLVs, such as a client's certificate.
pub const MAX_BYTES: usize = 16 * 1024;

/// Longest version 1 header, with its CRLF.
const MAX_BYTES_V1: usize = 107;

const SIGNATURE_V1: &[u8] = b"PROXY ";
const SIGNATURE_V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// The fixed part of a version 2 header.
const FIXED_BYTES_V2: usize = 16;

/// The shortest header: `PROXY UNKNOWN` with its CRLF.
const MIN_BYTES: usize = 15;

/// Result of parsing the bytes received so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The header is complete.
    Whole {
        /// The client of the sender; `None` if the header names none (`UNKNOWN`, `LOCAL`, a Unix
        /// socket). Then the socket's own peer counts.
        source: Option<SocketAddr>,
        /// Length of the header in bytes, which may be less than the input.
        length: usize,
    },
    /// The header is incomplete: it has at least this many bytes.
    Longer(usize),
}

/// Why a connection is closed before it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyProtocolFault {
    /// The socket's peer is not trusted to send the header.
    #[error("the peer is not in client_ip.trusted_proxies")]
    Untrusted,
    /// The bytes are no PROXY header.
    #[error("the connection does not begin with a valid PROXY header")]
    Malformed,
    /// More than [`MAX_BYTES`].
    #[error("the PROXY header is longer than {MAX_BYTES} bytes")]
    TooLong,
    /// The CRC32c does not match.
    #[error("the checksum of the PROXY header is wrong")]
    Checksum,
    /// The header did not arrive within `header_timeout`.
    #[error("the PROXY header did not arrive in time")]
    Timeout,
    /// The connection ended within the header.
    #[error("the connection ended within the PROXY header")]
    Incomplete,
}

impl ProxyProtocolFault {
    /// All values of the metric's label.
    pub const LABELS: [&str; 6] = [
        "untrusted",
        "malformed",
        "too_long",
        "checksum",
        "timeout",
        "incomplete",
    ];

    /// Value of the metric's label.
    pub fn label(self) -> &'static str {
        Self::LABELS[self as usize]
    }
}

/// How the wait for a header ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// The peer's address.
    From(IpAddr),
    /// The connection ended, or the gateway drains, before the first byte. Health checks of load
    /// balancers do that.
    Nothing,
}

/// Reads the header if one is required, and no byte beyond it.
pub(super) async fn receive<S: AsyncRead + Unpin>(
    required: &ProxyProtocol,
    peer: IpAddr,
    stream: &mut S,
    patience: Duration,
    ticket: &ConnectionGuard,
) -> Result<Received, ProxyProtocolFault> {
    let ProxyProtocol::Required(trusted) = required else {
        return Ok(Received::From(peer));
    };
    if !trusted.contains(peer.to_canonical()) {
        return Err(ProxyProtocolFault::Untrusted);
    }
    // boxed, so that connections without a header reserve no memory for it
    match Box::pin(tokio::time::timeout(patience, read(stream, ticket))).await {
        Ok(Ok(Some(source))) => Ok(Received::From(source.map_or(peer, |source| source.ip()))),
        Ok(Ok(None)) => Ok(Received::Nothing),
        Ok(Err(fault)) => Err(fault),
        Err(_) => Err(ProxyProtocolFault::Timeout),
    }
}

/// Reads the header; `None` if the connection ends before the first byte.
async fn read<S: AsyncRead + Unpin>(
    stream: &mut S,
    ticket: &ConnectionGuard,
) -> Result<Option<Option<SocketAddr>>, ProxyProtocolFault> {
    let mut header = Vec::with_capacity(MAX_BYTES_V1);
    let mut wanted = MIN_BYTES;
    loop {
        let seen = header.len();
        header.resize(wanted, 0);
        let read = std::future::poll_fn(|cx| {
            ticket.wake_with(cx.waker());
            if ticket.should_end() && seen == 0 {
                return Poll::Ready(Ok(0));
            }
            let mut buf = ReadBuf::new(&mut header[seen..]);
            std::pin::Pin::new(&mut *stream)
                .poll_read(cx, &mut buf)
                .map_ok(|()| buf.filled().len())
        });
        let read: io::Result<usize> = read.await;
        header.truncate(seen + read.unwrap_or(0));
        match header.len() {
            0 => return Ok(None),
            length if length == seen => return Err(ProxyProtocolFault::Incomplete),
            _ => {}
        }
        match parse(&header)? {
            Parsed::Whole { source, .. } => return Ok(Some(source)),
            Parsed::Longer(length) => wanted = length,
        }
    }
}

/// Parses a header from the first bytes of a connection; rejects other input as early as possible.
/// Linear in the number of bytes.
pub fn parse(bytes: &[u8]) -> Result<Parsed, ProxyProtocolFault> {
    let begins = |signature: &[u8]| {
        let both = bytes.len().min(signature.len());
        bytes[..both] == signature[..both]
    };
    if begins(SIGNATURE_V2) {
        parse_v2(bytes)
    } else if begins(SIGNATURE_V1) {
        parse_v1(bytes)
    } else {
        Err(ProxyProtocolFault::Malformed)
    }
}

/// `PROXY TCP4 192.0.2.1 198.51.100.7 56324 443` and CRLF.
fn parse_v1(bytes: &[u8]) -> Result<Parsed, ProxyProtocolFault> {
    let line = &bytes[..bytes.len().min(MAX_BYTES_V1)];
    if let Some(end) = line.windows(2).position(|two| two == b"\r\n") {
        let source = source_v1(&line[..end]).ok_or(ProxyProtocolFault::Malformed)?;
        let length = end + 2;
        return Ok(Parsed::Whole { source, length });
    }
    let is_sane = |byte: &u8| matches!(byte, b' '..=b'~');
    let (text, ending) = match line {
        [text @ .., b'\r'] => (text, 1),
        text => (text, 2),
    };
    let says_nothing = line.starts_with(b"PROXY UNKNOWN ");
    if line.len() + ending > MAX_BYTES_V1 || !(says_nothing || text.iter().all(is_sane)) {
        return Err(ProxyProtocolFault::Malformed);
    }
    Ok(Parsed::Longer((line.len() + ending).max(MIN_BYTES)))
}

fn source_v1(line: &[u8]) -> Option<Option<SocketAddr>> {
    // the rest of the line is ignored
    if line == b"PROXY UNKNOWN" || line.starts_with(b"PROXY UNKNOWN ") {
        return Some(None);
    }
    let mut words = str::from_utf8(line).ok()?.split(' ');
    let mut next = || words.next();
    let ("PROXY", protocol) = (next()?, next()?) else {
        return None;
    };
    let (source, destination) = (next()?, next()?);
    let source_port = port(next()?)?;
    port(next()?)?;
    let source = match protocol {
        "TCP4" => both::<Ipv4Addr>(source, destination)?.into(),
        "TCP6" => both::<Ipv6Addr>(source, destination)?.into(),
        _ => return None,
    };
    next()
        .is_none()
        .then_some(Some(SocketAddr::new(source, source_port)))
}

/// The first of two addresses, both of which must parse.
fn both<A: FromStr>(source: &str, destination: &str) -> Option<A> {
    let _: A = destination.parse().ok()?;
    source.parse().ok()
}

/// 0 to 65535, without leading zeros.
fn port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let plain = digits && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

fn parse_v2(bytes: &[u8]) -> Result<Parsed, ProxyProtocolFault> {
    const LOCAL: u8 = 0x20;
    const PROXY: u8 = 0x21;
    let command = bytes.get(12).copied();
    if command.is_some_and(|command| !matches!(command, LOCAL | PROXY)) {
        return Err(ProxyProtocolFault::Malformed);
    }
    let Some((&[.., family, high, low], rest)) = bytes.split_first_chunk::<FIXED_BYTES_V2>() else {
        let least = if bytes.len() < SIGNATURE_V2.len() {
            MIN_BYTES
        } else {
            FIXED_BYTES_V2
        };
        return Ok(Parsed::Longer(least));
    };
    let length = FIXED_BYTES_V2 + usize::from(u16::from_be_bytes([high, low]));
    let addresses = match (command, family) {
        (Some(LOCAL), _) | (_, 0x00) => None,
        (_, 0x11 | 0x12) => Some(4 + 4 + 2 + 2),
        (_, 0x21 | 0x22) => Some(16 + 16 + 2 + 2),
        (_, 0x31 | 0x32) => Some(108 + 108),
        _ => return Err(ProxyProtocolFault::Malformed),
    };
    if addresses.is_some_and(|addresses| length < FIXED_BYTES_V2 + addresses) {
        return Err(ProxyProtocolFault::Malformed);
    }
    if length > MAX_BYTES {
        return Err(ProxyProtocolFault::TooLong);
    }
    let Some(header) = bytes.get(..length) else {
        return Ok(Parsed::Longer(length));
    };
    if let Some(addresses) = addresses {
        check_tlvs(header, FIXED_BYTES_V2 + addresses)?;
    }
    let source = addresses.and_then(|_| source_v2(family, rest));
    Ok(Parsed::Whole { source, length })
}

fn source_v2(family: u8, block: &[u8]) -> Option<SocketAddr> {
    let (address, ports): (IpAddr, _) = match family >> 4 {
        1 => ((*block.first_chunk::<4>()?).into(), block.get(8..)?),
        2 => ((*block.first_chunk::<16>()?).into(), block.get(32..)?),
        // a Unix socket: a path is not an address
        _ => return None,
    };
    let port = u16::from_be_bytes(*ports.first_chunk()?);
    Some(SocketAddr::new(address, port))
}

/// Checks that the TLVs fill the header exactly, and the checksum if there is one.
fn check_tlvs(header: &[u8], mut at: usize) -> Result<(), ProxyProtocolFault> {
    const CHECKSUM: u8 = 0x03;
    let mut checksum = None;
    while at < header.len() {
        let Some([kind, high, low]) = header.get(at..at + 3) else {
            return Err(ProxyProtocolFault::Malformed);
        };
        let value = at + 3..at + 3 + usize::from(u16::from_be_bytes([*high, *low]));
        let written = header
            .get(value.clone())
            .ok_or(ProxyProtocolFault::Malformed)?;
        if *kind == CHECKSUM {
            let written: [u8; 4] = written
                .try_into()
                .map_err(|_| ProxyProtocolFault::Malformed)?;
            if checksum.replace((value.start, written)).is_some() {
                return Err(ProxyProtocolFault::Malformed);
            }
        }
        at = value.end;
    }
    let Some((place, written)) = checksum else {
        return Ok(());
    };
    let zeroed = header[..place]
        .iter()
        .chain(&[0; 4])
        .chain(&header[place + 4..]);
    if crc32c(zeroed) == u32::from_be_bytes(written) {
        Ok(())
    } else {
        Err(ProxyProtocolFault::Checksum)
    }
}

/// CRC-32C (Castagnoli), bit by bit: headers are short, and few carry a checksum.
fn crc32c<'a>(bytes: impl Iterator<Item = &'a u8>) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let step = |crc: u32, _| crc >> 1 ^ (POLYNOMIAL * (crc & 1));
    !bytes.fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::listener::Drain;

    /// Timeout for bytes that never arrive; available bytes are read first.
    const PATIENCE: Duration = Duration::from_millis(20);

    fn v2(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
        let length = u16::try_from(block.len()).expect("short enough");
        let fixed = [SIGNATURE_V2, &[command, family], &length.to_be_bytes()];
        [&fixed.concat(), block].concat()
    }

    const INET: [u8; 12] = [192, 0, 2, 1, 198, 51, 100, 7, 0xdc, 4, 1, 0xbb];

    fn source(bytes: &[u8]) -> Result<Option<String>, ProxyProtocolFault> {
        match parse(bytes)? {
            Parsed::Whole { source, length } if length == bytes.len() => {
                Ok(source.map(|source| source.to_string()))
            }
            other => panic!("{:?} is {other:?}", bytes.escape_ascii().to_string()),
        }
    }

    #[test]
    fn a_line_of_version_1_is_read_to_the_letter() {
        let named = |line: &str| source(format!("PROXY {line}\r\n").as_bytes());
        assert_eq!(
            named("TCP4 255.255.255.255 255.255.255.255 65535 65535"),
            Ok(Some("255.255.255.255:65535".to_owned()))
        );
        assert_eq!(
            named("TCP4 1.2.3.4 5.6.7.8 0 0"),
            Ok(Some("1.2.3.4:0".to_owned()))
        );
        let longest = "TCP6 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535";
        assert!(named(longest).is_ok_and(|source| source.is_some()));
        assert_eq!(named("UNKNOWN \x01\n\r anything"), Ok(None));
        for line in [
            "TCP4 1.2.3.4 5.6.7.8 1 2 ",
            "TCP4 1.2.3.4 5.6.7.8 1 2 3",
            "TCP4 1.2.3.4  5.6.7.8 1 2",
            " TCP4 1.2.3.4 5.6.7.8 1 2",
            "TCP4\t1.2.3.4 5.6.7.8 1 2",
            "tcp4 1.2.3.4 5.6.7.8 1 2",
            "TCP4 1.2.3.04 5.6.7.8 1 2",
            "TCP4 1.2.3.4 5.6.7.08 1 2",
            "TCP4 1.2.3 5.6.7.8 1 2",
            "TCP4 0x1.2.3.4 5.6.7.8 1 2",
            "TCP4 1.2.3.4 5.6.7.8 01 2",
            "TCP4 1.2.3.4 5.6.7.8 1 00",
            "TCP4 1.2.3.4 5.6.7.8 +1 2",
            "TCP4 1.2.3.4 5.6.7.8 -1 2",
            "TCP4 1.2.3.4 5.6.7.8  2",
            "TCP4 1.2.3.4 ::1 1 2",
            "TCP6 1.2.3.4 5.6.7.8 1 2",
            "TCP6 fe80::1%eth0 ::1 1 2",
            "TCP6 [::1] [::1] 1 2",
            "TCP4",
            "UNKNOWNX",
            "UDP4 1.2.3.4 5.6.7.8 1 2",
            "",
        ] {
            assert_eq!(named(line), Err(ProxyProtocolFault::Malformed), "{line:?}");
        }
    }

    #[test]
    fn bytes_that_can_become_no_header_are_refused_before_its_end() {
        for bytes in [
            &b"G"[..],
            b"PROXX",
            b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\n",
            b"PROXY TCP4 1.2.3.4\r ",
            b"PROXY TCP4 \xff",
            b"\r\n\r\n\0\r\nQUIX",
            b"\r\n\r\n\0\r\nQUIT\n\x11",
            b"\r\n\r\n\0\r\nQUIT\n\x22",
        ] {
            let shown = bytes.escape_ascii();
            assert_eq!(parse(bytes), Err(ProxyProtocolFault::Malformed), "{shown}");
        }
        let endless = [b"PROXY UNKNOWN ".to_vec(), vec![b'x'; MAX_BYTES_V1]].concat();
        assert_eq!(parse(&endless), Err(ProxyProtocolFault::Malformed));
    }

    #[test]
    fn an_announced_length_is_believed_up_to_a_bound_and_before_anything_is_read() {
        let announced = |length: u16| {
            let fixed = [SIGNATURE_V2, &[0x21, 0x11], &length.to_be_bytes()].concat();
            parse(&fixed)
        };
        assert_eq!(announced(11), Err(ProxyProtocolFault::Malformed));
        assert_eq!(announced(12), Ok(Parsed::Longer(28)));
        let most = u16::try_from(MAX_BYTES - FIXED_BYTES_V2).expect("within 64 KiB");
        assert_eq!(announced(most), Ok(Parsed::Longer(MAX_BYTES)));
        assert_eq!(announced(most + 1), Err(ProxyProtocolFault::TooLong));
        assert_eq!(announced(u16::MAX), Err(ProxyProtocolFault::TooLong));
    }

    #[test]
    fn who_names_no_address_counts_as_the_sockets_peer() {
        assert_eq!(source(&v2(0x20, 0x11, b"")), Ok(None), "LOCAL");
        assert_eq!(source(&v2(0x20, 0xff, b"junk")), Ok(None), "LOCAL");
        assert_eq!(source(&v2(0x21, 0x00, b"junk")), Ok(None), "UNSPEC");
        assert_eq!(source(&v2(0x21, 0x31, &[b'/'; 216])), Ok(None), "UNIX");
        assert_eq!(
            source(&v2(0x21, 0x12, &INET)),
            Ok(Some("192.0.2.1:56324".to_owned())),
            "a datagram's"
        );
        for family in [0x01, 0x10, 0x13, 0x30, 0x41] {
            assert_eq!(
                source(&v2(0x21, family, &[0; 216])),
                Err(ProxyProtocolFault::Malformed),
                "{family:#x}"
            );
        }
    }

    #[test]
    fn tlvs_fill_the_header_and_one_checksum_at_most_is_right() {
        let with = |tlvs: &[u8]| source(&v2(0x21, 0x11, &[&INET[..], tlvs].concat()));
        assert!(with(&[0x04, 0, 0, 0xea, 0, 2, 1, 2]).is_ok());
        assert_eq!(with(&[0x04, 0]), Err(ProxyProtocolFault::Malformed));
        assert_eq!(with(&[0x04, 0, 1]), Err(ProxyProtocolFault::Malformed));
        assert_eq!(
            with(&[0x03, 0, 3, 1, 2, 3]),
            Err(ProxyProtocolFault::Malformed)
        );
        assert_eq!(
            with(&[0x03, 0, 4, 1, 2, 3, 4]),
            Err(ProxyProtocolFault::Checksum)
        );
        let twice = [0x03, 0, 4, 0, 0, 0, 0, 0x03, 0, 4, 0, 0, 0, 0];
        assert_eq!(with(&twice), Err(ProxyProtocolFault::Malformed));
        // RFC 3720 §B.4
        assert_eq!(crc32c([0; 32].iter()), 0x8a91_36aa);
        assert_eq!(crc32c([0xff; 32].iter()), 0x62a8_ab43);
    }

    #[test]
    fn every_header_may_arrive_in_pieces_and_leaves_what_follows_unread() {
        let checked = v2(
            0x21,
            0x11,
            &[&INET[..], &[3, 0, 4, 0xd4, 0x5a, 0x11, 0xb9]].concat(),
        );
        let headers = [
            b"PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n".to_vec(),
            b"PROXY UNKNOWN\r\n".to_vec(),
            b"PROXY UNKNOWN \r\r\n".to_vec(),
            checked,
            v2(0x20, 0, b""),
        ];
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        for header in headers {
            let expected = parse(&header).expect("a header");
            assert!(
                matches!(expected, Parsed::Whole { length, .. } if length == header.len()),
                "{expected:?}"
            );
            for split in 1..=header.len() {
                runtime.block_on(async {
                    let (mut near, mut far) = tokio::io::duplex(256);
                    let ticket = Rc::new(Drain::default()).enter();
                    let sending = async {
                        let bytes = [&header, &b"GET"[..]].concat();
                        near.write_all(&bytes[..split]).await.expect("room");
                        tokio::task::yield_now().await;
                        near.write_all(&bytes[split..]).await.expect("room");
                    };
                    let (source, ()) = tokio::join!(read(&mut far, &ticket), sending);
                    let Parsed::Whole {
                        source: expected, ..
                    } = expected
                    else {
                        unreachable!("asserted above")
                    };
                    assert_eq!(source, Ok(Some(expected)), "split at {split}");
                    let mut rest = [0; 3];
                    far.read_exact(&mut rest).await.expect("it is still there");
                    assert_eq!(&rest, b"GET", "split at {split}");
                });
            }
        }
    }

    #[test]
    fn a_stranger_is_not_even_read_and_silence_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        let trusted = TrustedProxies::new(&["10.0.0.0/8".parse().expect("a network")]);
        let required = ProxyProtocol::Required(Arc::new(trusted));
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let received = |from: &str, sent: &'static [u8], ends: bool| {
            runtime.block_on(async {
                let (mut near, mut far) = tokio::io::duplex(256);
                let ticket = Rc::new(Drain::default()).enter();
                near.write_all(sent).await.expect("room");
                let _open = (!ends).then_some(near);
                receive(&required, address(from), &mut far, PATIENCE, &ticket).await
            })
        };
        let good = b"PROXY TCP4 192.0.2.1 198.51.100.7 1 2\r\n";
        let client = Ok(Received::From(address("192.0.2.1")));
        assert_eq!(received("10.0.0.1", good, false), client);
        assert_eq!(received("::ffff:10.0.0.1", good, false), client);
        assert_eq!(
            received("11.0.0.1", good, false),
            Err(ProxyProtocolFault::Untrusted)
        );
        assert_eq!(
            received("10.0.0.1", b"", false),
            Err(ProxyProtocolFault::Timeout)
        );
        assert_eq!(
            received("10.0.0.1", b"PROXY ", false),
            Err(ProxyProtocolFault::Timeout)
        );
        assert_eq!(
            received("10.0.0.1", b"PROXY ", true),
            Err(ProxyProtocolFault::Incomplete)
        );
        assert_eq!(received("10.0.0.1", b"", true), Ok(Received::Nothing));
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_what_is_longer_really_is(
            v2 in any::<bool>(),
            tail in prop::collection::vec(prop_oneof![Just(0u8), Just(b' '), Just(b'\r'), Just(b'\n'), Just(0x21), Just(0x11), any::<u8>()], 0..80),
        ) {
            let bytes = [if v2 { SIGNATURE_V2 } else { SIGNATURE_V1 }, &tail].concat();
            match parse(&bytes) {
                Ok(Parsed::Longer(least)) => prop_assert!(least > bytes.len() && least <= MAX_BYTES),
                Ok(Parsed::Whole { length, .. }) => prop_assert!(length <= bytes.len()),
                Err(_) => {}
            }
        }
    }
}
