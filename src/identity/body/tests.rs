//! Which body fields have a value, and which are unclear.

use proptest::prelude::*;

use super::*;

const JSON: Option<&str> = Some("application/json");
const FORM: Option<&str> = Some("application/x-www-form-urlencoded");

fn field(content_type: Option<&str>, body: &str, name: &str) -> FieldValue {
    let fields = BodyFields::parse(content_type, body.as_bytes(), &[name]);
    fields.get(name)
}

fn text(text: &str) -> FieldValue {
    FieldValue::Text(text.to_owned())
}

#[test]
fn one_name_is_one_value_however_it_is_sent() {
    for body in [
        r#"{"username":"alice"}"#,
        r#"{"username":" Alice\t"}"#,
        r#"{"\u0075sername":"\u0061lice"}"#,
        r#"{"UserName":"alice"}"#,
        r#"{"u\u017fername":"alice"}"#,
        r#"{"password":{"username":"x"},"username":"alice"}"#,
        r#"{"username":"alice","username":"ALICE"}"#,
        r#"{"username":null,"username":"alice"}"#,
        "\u{feff}{\"username\":\"alice\"}\n",
    ] {
        assert_eq!(field(JSON, body, "username"), text("alice"), "{body}");
    }
    for body in [
        "username=alice",
        "a=b&%75sername=+Alice",
        "username=alice&username=",
    ] {
        assert_eq!(field(FORM, body, "username"), text("alice"), "{body}");
    }
}

#[test]
fn numbers_and_booleans_are_what_they_would_be_written_as() {
    for (json, value) in [
        ("1", "1"),
        ("1.0", "1"),
        ("10e-1", "1"),
        // a parser that divides doubles reads 985163373.0000001
        ("9851633730000000000000000000000e-22", "985163373"),
        (
            "6040667583406784.0000000000000000000000",
            "6040667583406784",
        ),
        ("-0.0", "0"),
        ("-7", "-7"),
        ("true", "true"),
        ("\"1\"", "1"),
    ] {
        let body = format!("{{\"id\":{json}}}");
        assert_eq!(field(JSON, &body, "id"), text(value), "{body}");
    }
}

#[test]
fn a_number_that_no_double_holds_is_unclear() {
    for exact in [
        "9007199254740991",
        "9007199254740992",
        "9007199254740994",
        "-9007199254740992",
        "9223372036854775808",
        "-9223372036854775808",
        "18446744073709549568",
    ] {
        let body = format!("{{\"id\":{exact}}}");
        assert_eq!(field(JSON, &body, "id"), text(exact), "{body}");
    }
    for inexact in [
        "9007199254740993",
        "-9007199254740993",
        "9223372036854775807",
        "9223372036854775809",
        "-9223372036854775807",
        "18446744073709551615",
        "18446744073709551616",
        "9007199254740992.0",
        "9007199254740993.0",
        "1e24",
        "-1e24",
        "1000000000000000000000001",
    ] {
        let body = format!("{{\"id\":{inexact}}}");
        assert_eq!(field(JSON, &body, "id"), FieldValue::Unclear, "{body}");
        let body = format!("{{\"id\":\"{inexact}\"}}");
        assert_eq!(field(JSON, &body, "id"), text(inexact), "{body}");
    }
    // JavaScript reads one number from these
    let near = (9_223_372_036_854_775_508_u64..=9_223_372_036_854_776_108)
        .map(|id| field(JSON, &format!("{{\"id\":{id}}}"), "id"))
        .filter(|value| *value != FieldValue::Unclear);
    assert_eq!(near.count(), 1, "all but 2^63 itself");
}

#[test]
fn a_number_with_a_fraction_is_unclear() {
    // PHP's `(int)` reads 12345 from the first
    for number in ["12345.5", "12345.000000000002", "-0.5", "1e-9"] {
        let body = format!("{{\"id\":{number}}}");
        assert_eq!(field(JSON, &body, "id"), FieldValue::Unclear, "{body}");
    }
}

#[test]
fn what_parsers_read_differently_is_one_value_for_all() {
    for body in [
        r#"{"username":"alice","username":"x1"}"#,
        r#"{"username":"x1","USERNAME":"alice"}"#,
        r#"{"username":["alice"]}"#,
        r#"{"username":{"$ne":null}}"#,
        r#"[{"username":"alice"}]"#,
        r#"{"username":"alice",}"#,
        r#"{"username":"alice"} {"username":"x1"}"#,
        r#"{"username":"\ud800"}"#,
        r#"{"username":1e999}"#,
        r#"{'username':'alice'}"#,
        &("[".repeat(100_000) + "]"),
    ] {
        assert_eq!(
            field(JSON, body, "username"),
            FieldValue::Unclear,
            "{body:.40}"
        );
    }
    let twice = field(FORM, "username=alice&username=x1", "username");
    assert_eq!(twice, FieldValue::Unclear);
}

#[test]
fn what_is_not_there_is_absent() {
    for body in [
        "",
        " \n",
        "{}",
        "null",
        "7",
        r#"{"username":null}"#,
        r#"{"username":" "}"#,
        r#"{"a":"username"}"#,
        r#"{"user_name":"alice"}"#,
    ] {
        assert_eq!(field(JSON, body, "username"), FieldValue::Nothing, "{body}");
    }
    for content_type in [None, Some("text/plain"), FORM, Some(MULTIPART)] {
        assert_eq!(field(content_type, "\r\n", "username"), FieldValue::Nothing);
    }
}

#[test]
fn a_body_of_another_type_is_unclear() {
    for content_type in [
        None,
        Some(""),
        Some("text/plain"),
        Some("application/xml"),
        Some("application/json,text/plain"),
        Some("application/x-www-form-urlencoded2"),
        Some("application/x-www-form-urlencoded, application/json"),
        Some("multipart/form-data"),
        Some("multipart/mixed; boundary=x"),
        Some("application/json; charset=utf-16"),
        Some("application/json; charset=utf-8; charset=utf-7"),
        Some("application/json; charset*=utf-7''"),
        Some("application/json; a=\"; charset=utf-7\""),
        Some("application/x-www-form-urlencoded; charset=\"utf-7\""),
        Some("application/x-www-form-urlencoded;charset=latin1"),
    ] {
        for body in ["username=alice", r#"{"username":"alice"}"#] {
            let given = field(content_type, body, "username");
            assert_eq!(given, FieldValue::Unclear, "{content_type:?} {body}");
        }
    }
}

#[test]
fn the_head_says_how_a_body_is_written() {
    let of = |lines: &[(&str, &str)]| {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let name = http::HeaderName::from_bytes(name.as_bytes()).expect("a name");
            headers.append(name, value.parse().expect("a value"));
        }
        BodyFormat::of(&headers)
    };
    let json = ("content-type", "application/json");
    assert_eq!(of(&[json]), BodyFormat::Json);
    assert_eq!(
        of(&[json, ("content-encoding", "identity")]),
        BodyFormat::Json
    );
    for lines in [
        &[][..],
        &[json, json],
        &[json, ("content-encoding", "gzip")],
        &[json, ("content-encoding", ""), ("content-encoding", "br")],
        &[("content-type", "application/json; x=\u{e4}")],
    ] {
        assert_eq!(of(lines), BodyFormat::Unclear, "{lines:?}");
    }
}

#[test]
fn a_form_that_may_be_something_else_is_unclear() {
    for body in [
        r#"{"username":"alice"}"#,
        r#"{"username":"alice","x":"&username=bob&"}"#,
        "username=alice;username=bob",
        "username=alice\r\n&x=1",
        "<a>username=alice</a>",
        "username=alice&%zz=1",
        "username=alice&%ff=1",
        "username=al%zzice",
        "username=al%u0069ce",
        "username=%c1%a1lice",
        "username=alice%00",
        "username=alice&username[]=bob",
        "username=alice&username%00x=bob",
        "username=alice&[username]=bob",
        "username[a]=alice&username[b]=bob",
        "_charset_=utf-7&username=alice",
        "__proto__[username]=alice&x=1",
    ] {
        assert_eq!(field(FORM, body, "username"), FieldValue::Unclear, "{body}");
    }
    for body in [
        "user.name=alice",
        "user%20name=alice",
        "user[name=alice",
        "user[name]=alice",
    ] {
        assert_eq!(field(FORM, body, "user_name"), text("alice"), "{body}");
    }
    let raw = "username=a b@c.example&password=\"'#^|`~\n";
    assert_eq!(field(FORM, raw, "username"), text("a b@c.example"));
}

#[test]
fn json_that_may_be_something_else_is_unclear() {
    for body in [
        r#"{"username":"alice","x":"&username=bob&"}"#,
        r#"{"username\u0000x":"alice","username":"bob"}"#,
        r#"{"__proto__":{"username":"alice"}}"#,
        r#"{"username":"alice\u0000"}"#,
        r#"{"username":"al\u0007ice"}"#,
        r#"/**/{"username":"alice"}"#,
        r#"{"username":"alice","x":NaN}"#,
        "\u{feff}\u{feff}{\"username\":\"alice\"}",
    ] {
        assert_eq!(field(JSON, body, "username"), FieldValue::Unclear, "{body}");
    }
    let utf16: Vec<u8> =
        r#"{"username":"alice"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let fields = BodyFields::parse(JSON, &utf16, &["username"]);
    assert_eq!(fields.get("username"), FieldValue::Unclear);
    let invalid = b"{\"username\":\"alice\",\"x\":\"\xff\"}";
    let fields = BodyFields::parse(JSON, invalid, &["username"]);
    assert_eq!(fields.get("username"), FieldValue::Unclear);
    for body in [
        r#"{"username":"alice","password":"&%zz=1&x&=&&"}"#,
        r#"{"username" : "alice","password":"x=1&y=2"}"#,
        r#"{"username":"alice","x":"&username=Alice&"}"#,
        r#"{"username\u0000x":"alice"}"#,
    ] {
        assert_eq!(field(JSON, body, "username"), text("alice"), "{body}");
    }
}

const MULTIPART: &str = "multipart/form-data; boundary=----b1";

/// Joins parts with boundaries.
fn multipart(parts: &[&str]) -> String {
    let parts: String = parts
        .iter()
        .map(|part| format!("------b1\r\nContent-Disposition: form-data; {part}\r\n"))
        .collect();
    format!("{parts}------b1--\r\n")
}

#[test]
fn a_form_with_files_is_read_as_browsers_write_it() {
    let file =
        "name=\"avatar\"; filename=\"a.png\"\r\nContent-Type: image/png\r\n\r\n\u{1}\r\n--\r\n";
    for parts in [
        &["name=\"username\"\r\n\r\nAlice"][..],
        &[file, "name=\"username\"\r\n\r\n alice"],
        &["name=\"username[]\"\r\n\r\nalice", file],
        &["name=\"a\"\r\n\r\n", "name=\"username\"\r\n\r\nalice"],
    ] {
        let body = multipart(parts);
        assert_eq!(
            field(Some(MULTIPART), &body, "username"),
            text("alice"),
            "{body}"
        );
    }
    let body = multipart(&[file]);
    assert_eq!(
        field(Some(MULTIPART), &body, "username"),
        FieldValue::Nothing
    );
}

#[test]
fn a_form_with_files_that_is_written_in_another_way_is_unclear() {
    let alice = "name=\"username\"\r\n\r\nalice";
    for body in [
        multipart(&[alice, "name=\"username\"\r\n\r\nbob"]),
        multipart(&[alice, "name=\"user\\\"name\"\r\n\r\nbob"]),
        multipart(&[alice, "name=\"user%6eame\"\r\n\r\nbob"]),
        multipart(&[alice, "name=username\r\n\r\nbob"]),
        multipart(&[alice, "name=\"x\"; name=\"username\"\r\n\r\nbob"]),
        multipart(&[alice, "name=\"x\"; filename*=utf-8''y\r\n\r\nbob"]),
        multipart(&[
            alice,
            "name=\"x\"\r\nContent-Transfer-Encoding: base64\r\n\r\nbob",
        ]),
        multipart(&["name=\"username\"; filename=\"x\"\r\n\r\nalice"]),
        multipart(&["name=\"username\"\r\nContent-Type: text/plain; charset=utf-7\r\n\r\nalice"]),
        multipart(&[alice, "name=\"_charset_\"\r\n\r\nutf-7"]),
        multipart(&[alice]).replace("\r\n", "\n"),
        multipart(&[alice]).replace("b1--\r\n", "b1--\r\nrest"),
        multipart(&[alice]).replace("b1--\r\n", ""),
        format!("preamble\r\n{}", multipart(&[alice])),
        multipart(&[
            alice,
            "name=\"x\"\r\n\r\n\n------b1\nContent-Disposition: form-data; name=\"username\"\n\nbob",
        ]),
        "username=alice".to_owned(),
    ] {
        assert_eq!(
            field(Some(MULTIPART), &body, "username"),
            FieldValue::Unclear,
            "{body}"
        );
    }
    for content_type in [
        "multipart/form-data; boundary=\"----b1\"",
        "multipart/form-data; boundary=----b1; charset=utf-7",
        "multipart/form-data; boundary=----b1; boundary=x",
        "multipart/form-data; boundary=",
        "multipart/form-data; x=y",
    ] {
        let given = field(Some(content_type), &multipart(&[alice]), "username");
        assert_eq!(given, FieldValue::Unclear, "{content_type}");
    }
}

#[test]
fn type_is_compared_without_its_harmless_parameters_and_case() {
    for content_type in [
        "Application/JSON; charset=utf-8",
        "application/json;charset=\"UTF-8\" ",
        "application/json; profile=\"x\"",
        "application/vnd.api+json",
        "text/json",
    ] {
        let given = field(Some(content_type), r#"{"a":"b"}"#, "a");
        assert_eq!(given, text("b"), "{content_type}");
    }
}

#[test]
fn a_dot_leads_into_an_object() {
    for body in [
        r#"{"user":{"name":"alice"}}"#,
        r#"{"user.name":"alice"}"#,
        r#"{"USER":{"x":1,"Name":"alice"},"name":"x"}"#,
        r#"{"user":{"name":"alice"},"user":{"other":1}}"#,
    ] {
        assert_eq!(field(JSON, body, "user.name"), text("alice"), "{body}");
    }
    for body in [
        r#"{"user":{"name":"alice"},"user.name":"x1"}"#,
        r#"{"user":[{"name":"alice"}]}"#,
    ] {
        assert_eq!(
            field(JSON, body, "user.name"),
            FieldValue::Unclear,
            "{body}"
        );
    }
    for body in [
        r#"{"user":"alice"}"#,
        r#"{"name":"alice"}"#,
        r#"{"user":{"user":{"name":"alice"}}}"#,
    ] {
        assert_eq!(
            field(JSON, body, "user.name"),
            FieldValue::Nothing,
            "{body}"
        );
    }
    let body = br#"{"user":{"name":"alice"},"id":1}"#;
    let both = BodyFields::parse(JSON, body, &["user.name", "id", "user"]);
    assert_eq!(both.get("user.name"), text("alice"));
    assert_eq!(both.get("id"), text("1"));
    assert_eq!(both.get("user"), FieldValue::Unclear);
}

#[test]
fn debug_form_hides_the_values() {
    let fields = BodyFields::parse(FORM, b"password=hunter2", &["password"]);
    assert_eq!(format!("{fields:?}"), r#"BodyFields({"password"})"#);
}

proptest! {
    #[test]
    fn no_body_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        BodyFields::parse(JSON, &bytes, &["a.b", "a"]);
        BodyFields::parse(FORM, &bytes, &["a.b", "a"]);
        BodyFields::parse(Some(MULTIPART), &bytes, &["a.b", "a"]);
    }

    #[test]
    fn no_text_like_json_makes_it_panic(text in "[\\[\\]{}\",:ab.0-9\\\\u ]{0,40}") {
        BodyFields::parse(JSON, text.as_bytes(), &["a.b", "a"]);
    }
}
