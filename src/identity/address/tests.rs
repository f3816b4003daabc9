//! Which addresses in forwarding headers are trusted.

use proptest::prelude::*;

use super::*;

fn trusted() -> TrustedProxies {
    TrustedProxies::new(
        &["10.0.0.0/8", "2001:db8:f::/48"].map(|text| text.parse().expect("a network")),
    )
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn headers(lines: &[(&str, &str)]) -> HeaderMap {
    let line = |(name, value): &(&str, &str)| {
        (
            name.parse::<HeaderName>().expect("a name"),
            HeaderValue::from_str(value).expect("a value"),
        )
    };
    lines.iter().map(line).collect()
}

fn chain(source: &AddressSource, hops: Option<u8>) -> Chain {
    Chain {
        source: source.clone(),
        trusted: trusted(),
        hops,
    }
}

fn addresses(source: &AddressSource, peer: &str, headers: &HeaderMap) -> RequestAddresses {
    chain(source, None).resolve(address(peer), headers, |_| ())
}

fn single() -> AddressSource {
    AddressSource::Single(HeaderName::from_static("cf-connecting-ip"))
}

#[test]
fn single_header_is_believed_from_a_trusted_peer_only() {
    let headers = headers(&[
        ("cf-connecting-ip", " 198.51.100.7\t"),
        ("x-forwarded-for", "1.1.1.1"),
    ]);
    assert_eq!(
        addresses(&single(), "10.0.0.1", &headers).client,
        address("198.51.100.7")
    );
    assert_eq!(
        addresses(&single(), "203.0.113.9", &headers).client,
        address("203.0.113.9")
    );
}

#[test]
fn single_header_that_is_not_one_address_leaves_the_peer_in_doubt() {
    for (lines, doubt) in [
        (vec![], None),
        (
            vec![("cf-connecting-ip", "")],
            Some(AddressFault::Malformed),
        ),
        (
            vec![("cf-connecting-ip", "1.1.1.1, 2.2.2.2")],
            Some(AddressFault::Malformed),
        ),
        (
            vec![
                ("cf-connecting-ip", "1.1.1.1"),
                ("cf-connecting-ip", "1.1.1.1"),
            ],
            Some(AddressFault::Repeated),
        ),
    ] {
        let found = addresses(&single(), "10.0.0.1", &headers(&lines));
        assert_eq!(
            (found.client, found.doubt),
            (address("10.0.0.1"), doubt),
            "{lines:?}"
        );
    }
}

#[test]
fn no_source_reads_no_header() {
    let headers = headers(&[
        ("x-forwarded-for", "198.51.100.7"),
        ("forwarded", "for=198.51.100.7"),
    ]);
    assert_eq!(
        addresses(&AddressSource::None, "10.0.0.1", &headers).client,
        address("10.0.0.1")
    );
}

#[test]
fn one_source_never_falls_back_to_another() {
    let headers = headers(&[("forwarded", "for=198.51.100.7")]);
    assert_eq!(
        addresses(&AddressSource::XForwardedFor, "10.0.0.1", &headers).client,
        address("10.0.0.1")
    );
}

#[test]
fn cap_counts_elements_over_all_lines_and_empty_ones() {
    let hops = vec!["10.0.0.2"; ELEMENTS_MAX - 1].join(",");
    let at_the_cap = headers(&[
        ("x-forwarded-for", "198.51.100.7"),
        ("x-forwarded-for", &hops),
    ]);
    assert_eq!(
        addresses(&AddressSource::XForwardedFor, "10.0.0.1", &at_the_cap).client,
        address("198.51.100.7")
    );
    let beyond = headers(&[
        ("x-forwarded-for", "198.51.100.7"),
        ("x-forwarded-for", ""),
        ("x-forwarded-for", &hops),
    ]);
    let found = addresses(&AddressSource::XForwardedFor, "10.0.0.1", &beyond);
    assert_eq!(
        (found.client, found.doubt),
        (address("10.0.0.2"), Some(AddressFault::TooLong))
    );
}

#[test]
fn bytes_beyond_ascii_end_the_walk() {
    let mut map = HeaderMap::new();
    map.insert(
        X_FORWARDED_FOR,
        HeaderValue::from_bytes(b"198.51.100.7, \xff").expect("obs-text is allowed"),
    );
    let found = addresses(&AddressSource::XForwardedFor, "10.0.0.1", &map);
    assert_eq!(
        (found.client, found.doubt),
        (address("10.0.0.1"), Some(AddressFault::Malformed))
    );
}

#[test]
fn every_step_is_shown_with_its_reason() {
    let headers = headers(&[("x-forwarded-for", "1.1.1.1, 198.51.100.7:80,, 10.0.0.2")]);
    let mut steps = Vec::new();
    let chain = chain(&AddressSource::XForwardedFor, None);
    chain.resolve(address("::ffff:10.0.0.1"), &headers, |step| {
        steps.push(step.to_string())
    });
    assert_eq!(
        steps,
        [
            "peer 10.0.0.1 is a trusted proxy",
            "\"10.0.0.2\" is the trusted proxy 10.0.0.2: continue to its left",
            "\"\" is empty: skipped",
            "\"198.51.100.7:80\" is 198.51.100.7: the client",
        ]
    );
}

#[test]
fn only_the_listed_forms_are_addresses() {
    for (text, expected) in [
        ("1.2.3.4", Some("1.2.3.4")),
        ("1.2.3.4:0", Some("1.2.3.4")),
        ("1.2.3.4:65535", Some("1.2.3.4")),
        ("2001:db8::1.2.3.4", Some("2001:db8::102:304")),
        ("[::ffff:1.2.3.4]:1", Some("1.2.3.4")),
        (
            "[0000:0000:0000:0000:0000:ffff:255.255.255.255]:65535",
            Some("255.255.255.255"),
        ),
        ("1.2.3.4:", None),
        ("1.2.3.4:+1", None),
        ("1.2.3.4:000001", None),
        ("1.2.3.4:65536", None),
        ("1.2.3", None),
        ("[1.2.3.4]", None),
        ("[::1", None),
        ("[::1]1", None),
        ("[::1]:", None),
        ("[::1]:1:1", None),
        ("[fe80::1%1]", None),
        ("::1:", None),
        ("localhost", None),
        ("", None),
    ] {
        assert_eq!(parse(text.as_bytes()), expected.map(address), "{text}");
    }
}

#[test]
fn trim_takes_spaces_and_tabs_only() {
    assert_eq!(trim(b" \t a b\t "), b"a b");
    assert_eq!(trim(b" \t"), b"");
    assert_eq!(trim(b"\x0ba"), b"\x0ba");
}

#[test]
fn prefix_beyond_the_address_is_the_whole_address() {
    let wide = Prefixes {
        ipv4: 200,
        ipv6: 200,
    };
    assert_eq!(wide.aggregate(address("1.2.3.4")).to_string(), "1.2.3.4/32");
    assert_eq!(
        wide.aggregate(address("2001:db8::1")).to_string(),
        "2001:db8::1/128"
    );
}

proptest! {
    /// Text to the left of an address that a trusted proxy wrote has no effect.
    #[test]
    fn what_a_client_wrote_changes_nothing(forged in "[ -~]{0,40}", hops in 0usize..4) {
        let hops = ", 10.0.0.2".repeat(hops);
        let list = format!("{forged}, 198.51.100.7{hops}");
        let headers = headers(&[("x-forwarded-for", &list)]);
        let found = addresses(&AddressSource::XForwardedFor, "10.0.0.1", &headers);
        prop_assert_eq!((found.client, found.doubt), (address("198.51.100.7"), None));
    }

    /// The client is the peer or an address in the header.
    #[test]
    fn no_header_panics_or_invents_an_address(value in prop::collection::vec(prop_oneof![32u8..127, 128u8..=255, Just(b','), Just(b' ')], 0..200)) {
        let mut map = HeaderMap::new();
        map.insert(X_FORWARDED_FOR, HeaderValue::from_bytes(&value).expect("no controls"));
        map.insert("forwarded", HeaderValue::from_bytes(&value).expect("no controls"));
        let peer = address("10.0.0.1");
        let found = addresses(&AddressSource::XForwardedFor, "10.0.0.1", &map);
        prop_assert!(found.client == peer || value.split(|&byte| byte == b',').any(|text| parse(trim(text)) == Some(found.client)));
        addresses(&AddressSource::Forwarded, "10.0.0.1", &map);
    }
}

#[test]
fn counted_lists_end_at_the_element_that_the_outermost_proxy_wrote() {
    let found = |hops, peer: &str, value: &str| {
        let headers = headers(&[("x-forwarded-for", value)]);
        let chain = chain(&AddressSource::XForwardedFor, Some(hops));
        let mut last = String::new();
        let found = chain.resolve(address(peer), &headers, |step| last = step.to_string());
        (found.client.to_string(), found.doubt, last)
    };
    let client = |hops, value| found(hops, "10.0.0.1", value).0;
    assert_eq!(client(1, "6.6.6.6, 198.51.100.7"), "198.51.100.7");
    assert_eq!(
        client(2, "6.6.6.6, 198.51.100.7,, 10.0.0.2"),
        "198.51.100.7"
    );
    // the inner hops are counted even if they are not addresses
    assert_eq!(client(2, "198.51.100.7, unknown"), "198.51.100.7");
    assert_eq!(client(1, "198.51.100.7, unknown"), "10.0.0.1");
    let short = found(3, "10.0.0.1", "198.51.100.7, 10.0.0.2");
    assert_eq!(short.0, "10.0.0.1");
    assert_eq!(short.1, Some(AddressFault::TooShort));
    assert!(short.2.contains("2 of the 3"), "{}", short.2);
    let long = ",".repeat(40);
    assert_eq!(found(1, "10.0.0.1", &long).1, Some(AddressFault::TooLong));
    // if networks are named, only those are trusted
    assert_eq!(found(1, "11.0.0.1", "198.51.100.7").0, "11.0.0.1");
}

#[test]
fn a_proxys_own_request_without_a_list_is_no_doubt() {
    let chain = chain(&AddressSource::XForwardedFor, Some(2));
    let found = chain.resolve(address("10.0.0.1"), &HeaderMap::new(), |_| ());
    assert_eq!((found.client, found.doubt), (address("10.0.0.1"), None));
}
