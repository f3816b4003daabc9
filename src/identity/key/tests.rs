//! Which clients share a bucket and which must not.

use std::net::IpAddr;

use http::HeaderName;
use proptest::prelude::*;

use super::*;
use crate::identity::tests::headers;

const PREFIXES: Prefixes = Prefixes { ipv4: 32, ipv6: 64 };

fn hasher() -> KeyHasher {
    KeyHasher::new([7; 16])
}

fn client(address: &str) -> Client<'static> {
    let address: IpAddr = address.parse().expect("an address");
    Client::anonymous(address)
}

fn subject<'a>(client: &'a Client<'a>, headers: &'a HeaderMap) -> KeySubject<'a> {
    KeySubject {
        client,
        method: &Method::GET,
        host: "a.example",
        route: "login",
        path: "/login",
        headers,
        query: None,
        params: &|_| None,
        body: None,
    }
}

fn key_of(parts: &[KeyPart], subject: &KeySubject<'_>) -> Option<Key> {
    match KeyParts::new("limit", parts.to_vec()).key(Missing::Skip, &hasher(), PREFIXES, subject) {
        Keyed::Bucket(key) => Some(key),
        Keyed::Skip => None,
        Keyed::Missing(part) => panic!("{part} must be skipped, not rejected"),
    }
}

fn readable(parts: &[KeyPart], subject: &KeySubject<'_>) -> String {
    KeyParts::new("limit", parts.to_vec()).readable(&hasher(), PREFIXES, subject)
}

#[test]
fn addresses_of_one_network_share_a_bucket() {
    let none = HeaderMap::new();
    let ip = |address: &str| key_of(&[KeyPart::Ip], &subject(&client(address), &none));
    assert_eq!(ip("2001:db8::1"), ip("2001:db8::ffff"));
    assert_ne!(ip("2001:db8::1"), ip("2001:db8:0:1::1"));
    assert_ne!(ip("203.0.113.9"), ip("203.0.113.10"));
    assert_eq!(ip("203.0.113.9"), ip("::ffff:203.0.113.9"));
}

#[test]
fn limits_with_equal_parts_have_their_own_buckets() {
    let (client, none) = (client("203.0.113.9"), HeaderMap::new());
    let subject = subject(&client, &none);
    let key = |limit| {
        let parts = KeyParts::new(limit, vec![KeyPart::Ip]);
        match parts.key(Missing::Skip, &hasher(), PREFIXES, &subject) {
            Keyed::Bucket(key) => Some(key),
            Keyed::Skip | Keyed::Missing(_) => None,
        }
    };
    assert_eq!(key("one"), key("one"));
    assert_ne!(key("one"), key("two"));
}

#[test]
fn secret_decides_the_key() {
    let (client, none) = (client("203.0.113.9"), HeaderMap::new());
    let parts = KeyParts::new("limit", vec![KeyPart::Ip]);
    let key = |secret| {
        parts.key(
            Missing::Skip,
            &KeyHasher::new([secret; 16]),
            PREFIXES,
            &subject(&client, &none),
        )
    };
    assert_ne!(key(1), key(2));
    assert_eq!(
        format!("{:?}", KeyHasher::new([1; 16])),
        "KeyHasher(secret)"
    );
}

#[test]
fn part_without_a_value_leaves_the_limit_out() {
    let (client, headers) = (
        client("203.0.113.9"),
        headers(&[("x-empty", " "), ("x-empty", "")]),
    );
    let subject = subject(&client, &headers);
    let absent = KeyPart::Header(HeaderName::from_static("x-absent"));
    let empty = KeyPart::Header(HeaderName::from_static("x-empty"));
    for part in [
        KeyPart::User,
        KeyPart::Tenant,
        KeyPart::Tier,
        KeyPart::UserAgent,
        absent,
        empty,
    ] {
        assert_eq!(
            key_of(&[KeyPart::Ip, part.clone()], &subject),
            None,
            "{part:?}"
        );
        assert!(
            readable(std::slice::from_ref(&part), &subject).ends_with("=-"),
            "{part:?}"
        );
    }
}

#[test]
fn user_or_ip_is_the_user_where_there_is_one() {
    let none = HeaderMap::new();
    let anonymous = client("203.0.113.9");
    let alice = Client {
        user: Some("alice"),
        ..anonymous
    };
    let elsewhere = Client {
        user: Some("alice"),
        ..client("198.51.100.7")
    };
    let key = |client: &Client<'_>| key_of(&[KeyPart::UserOrIp], &subject(client, &none));
    assert_eq!(key(&alice), key(&elsewhere));
    assert_ne!(key(&alice), key(&anonymous));
}

#[test]
fn user_named_like_an_address_is_not_that_address() {
    let none = HeaderMap::new();
    let anonymous = client("97.98.99.100");
    let user = Client {
        user: Some("abcd"),
        ..anonymous
    };
    let key = |client: &Client<'_>| key_of(&[KeyPart::UserOrIp], &subject(client, &none));
    assert_ne!(key(&user), key(&anonymous));
}

#[test]
fn parts_are_kept_apart() {
    let none = HeaderMap::new();
    let anonymous = client("203.0.113.9");
    let key = |user, tenant| {
        let client = Client {
            user: Some(user),
            tenant: Some(tenant),
            ..anonymous
        };
        key_of(&[KeyPart::User, KeyPart::Tenant], &subject(&client, &none))
    };
    assert_ne!(key("a", "bc"), key("ab", "c"));
    assert_ne!(key("", "abc"), key("abc", ""));
}

#[test]
fn head_shares_the_bucket_of_get() {
    let (client, none) = (client("203.0.113.9"), HeaderMap::new());
    let key = |method| {
        key_of(
            &[KeyPart::Method],
            &KeySubject {
                method: &method,
                ..subject(&client, &none)
            },
        )
    };
    assert_eq!(key(Method::HEAD), key(Method::GET));
    assert_ne!(key(Method::POST), key(Method::GET));
}

#[test]
fn whitespace_around_a_field_buys_no_second_bucket() {
    let client = client("203.0.113.9");
    let parts = [KeyPart::Header(HeaderName::from_static("x-token"))];
    let mut padded = HeaderMap::new();
    padded.insert(
        "x-token",
        HeaderValue::from_bytes(b" secret\t").expect("a value"),
    );
    let plain = headers(&[("x-token", "secret")]);
    let twice = headers(&[("x-token", "secret"), ("x-token", "secret")]);
    assert_eq!(
        key_of(&parts, &subject(&client, &padded)),
        key_of(&parts, &subject(&client, &plain))
    );
    assert_ne!(
        key_of(&parts, &subject(&client, &twice)),
        key_of(&parts, &subject(&client, &plain))
    );
}

#[test]
fn readable_key_names_its_parts_and_hides_field_values() {
    let headers = headers(&[("user-agent", "curl/8"), ("x-token", "secret")]);
    let client = Client {
        user: Some("alice"),
        tier: Some("pro"),
        tenant: Some("acme"),
        ..client("203.0.113.9")
    };
    let subject = subject(&client, &headers);
    let all = [
        KeyPart::Ip,
        KeyPart::User,
        KeyPart::UserOrIp,
        KeyPart::Tenant,
        KeyPart::Tier,
        KeyPart::Method,
        KeyPart::Host,
        KeyPart::Route,
        KeyPart::Path,
    ];
    let expected = "ip=203.0.113.9/32, user=alice, user=alice, tenant=acme, tier=pro, method=GET, host=a.example, route=login, path=/login";
    assert_eq!(readable(&all, &subject), expected);
    assert_eq!(readable(&[], &subject), "all");

    let hidden = readable(
        &[
            KeyPart::UserAgent,
            KeyPart::Header(HeaderName::from_static("x-token")),
        ],
        &subject,
    );
    let shape: String = hidden
        .chars()
        .map(|c| if c.is_ascii_hexdigit() { '0' } else { c })
        .collect();
    assert_eq!(
        hidden.len(),
        "user_agent=#00000000, header:x-token=#00000000".len(),
        "{hidden}"
    );
    assert!(
        shape.ends_with("=#00000000") && !hidden.contains("curl") && !hidden.contains("secret"),
        "{hidden}"
    );
}

#[test]
fn readable_key_is_bounded() {
    let (client, none) = (client("203.0.113.9"), HeaderMap::new());
    let path = format!("/{}", "é".repeat(10_000));
    let shown = readable(
        &[KeyPart::Path],
        &KeySubject {
            path: &path,
            ..subject(&client, &none)
        },
    );
    assert!(
        shown.len() <= "path=".len() + SHOWN_MAX_BYTES,
        "{}",
        shown.len()
    );
}

fn query(name: &str) -> KeyPart {
    KeyPart::Query(name.to_owned())
}

#[test]
fn missing_part_is_skipped_shared_or_refused() {
    let none = HeaderMap::new();
    let (one, other) = (client("203.0.113.9"), client("198.51.100.7"));
    let parts = KeyParts::new("limit", vec![KeyPart::Ip, query("q"), KeyPart::User]);
    let key = |missing, client: &Client<'_>, query| {
        let subject = KeySubject {
            query,
            ..subject(client, &none)
        };
        match parts.key(missing, &hasher(), PREFIXES, &subject) {
            Keyed::Bucket(key) => Ok(key),
            Keyed::Skip => Err("skip".to_owned()),
            Keyed::Missing(part) => Err(part.to_string()),
        }
    };
    assert_eq!(key(Missing::Skip, &one, None), Err("skip".to_owned()));
    assert_eq!(key(Missing::Reject, &one, None), Err("query:q".to_owned()));
    assert_eq!(
        key(Missing::Reject, &one, Some("q=1")),
        Err("user".to_owned())
    );
    let shared = |client, query| key(Missing::Shared, client, query).expect("a bucket");
    assert_eq!(shared(&one, None), shared(&one, Some("q=+")));
    assert_ne!(shared(&one, None), shared(&other, None));
    assert_ne!(shared(&one, None), shared(&one, Some("q=-")));
    assert_ne!(shared(&one, None), shared(&one, Some("q=1&q=2")));
}

#[test]
fn every_source_of_a_value_keys_a_limit() {
    let client = client("203.0.113.9");
    let body = |text: &str| BodyFields::parse(Some("application/json"), text.as_bytes(), &["a"]);
    let key = |part: &KeyPart, value: &str| {
        let cookie = HeaderValue::from_str(&format!("a={value}")).expect("a value");
        let headers = HeaderMap::from_iter([(http::header::COOKIE, cookie)]);
        let (query, body) = (
            format!("a={value}"),
            body(&format!("{{\"a\":\"{value}\"}}")),
        );
        let subject = KeySubject {
            query: Some(&query),
            params: &|name| (name == "a").then_some(value),
            body: Some(&body),
            ..subject(&client, &headers)
        };
        key_of(std::slice::from_ref(part), &subject)
    };
    let named = [
        KeyPart::Query,
        KeyPart::Cookie,
        KeyPart::Param,
        KeyPart::Body,
    ];
    for part in named.map(|part| part("a".to_owned())) {
        assert_eq!(key(&part, "Alice"), key(&part, "alice"), "{part}");
        assert_ne!(key(&part, "alice"), key(&part, "bob"), "{part}");
        assert!(key(&part, "alice").is_some(), "{part}");
        assert_eq!(key(&part, ""), None, "{part}");
        assert_eq!(key(&part, " "), None, "{part}");
    }
    let absent = named.map(|part| part("b".to_owned()));
    assert!(absent.iter().all(|part| key(part, "alice").is_none()));
}

#[test]
fn a_limit_without_body_parts_wants_no_body() {
    let parts = |parts: &[KeyPart]| KeyParts::new("limit", parts.to_vec());
    assert!(
        parts(&[KeyPart::Ip, query("a")])
            .wanted_body_fields()
            .is_empty()
    );
    let both = ["username", "user.id"].map(|name| KeyPart::Body(name.to_owned()));
    assert_eq!(parts(&both).wanted_body_fields(), ["username", "user.id"]);
}

#[test]
fn readable_key_hides_what_a_query_a_cookie_or_a_body_holds() {
    let (client, headers) = (client("203.0.113.9"), headers(&[("cookie", "sid=secret")]));
    let body = BodyFields::parse(Some("application/json"), b"{\"a\":[]}", &["a"]);
    let subject = KeySubject {
        query: Some("q=secret"),
        params: &|_| Some("Secret%20path"),
        body: Some(&body),
        ..subject(&client, &headers)
    };
    let parts = [
        query("q"),
        KeyPart::Cookie("sid".to_owned()),
        KeyPart::Cookie("none".to_owned()),
        KeyPart::Body("a".to_owned()),
        KeyPart::Param("id".to_owned()),
    ];
    let shown = readable(&parts, &subject);
    let rest = shown.split_once(", cookie:none").expect("the third part").1;
    assert_eq!(rest, "=-, body:a=?, param:id=Secret%20path");
    assert!(shown.starts_with("query:q=#"), "{shown}");
    assert!(shown.contains(", cookie:sid=#"), "{shown}");
    assert!(!shown.contains("secret"), "{shown}");
    assert!(!format!("{subject:?}").contains("secret"));
}

proptest! {
    #[test]
    fn different_values_have_different_keys(one in prop::collection::vec("[a-c]{0,3}", 3), other in prop::collection::vec("[a-c]{0,3}", 3)) {
        let none = HeaderMap::new();
        let anonymous = client("203.0.113.9");
        let key = |texts: &[String]| {
            let client = Client { user: Some(&texts[0]), tenant: Some(&texts[1]), tier: Some(&texts[2]), ..anonymous };
            key_of(&[KeyPart::User, KeyPart::Tenant, KeyPart::Tier], &subject(&client, &none))
        };
        prop_assert_eq!(one == other, key(&one) == key(&other));
    }
}
