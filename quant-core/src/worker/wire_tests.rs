//! Messages are read back as they were sent. Malformed and truncated messages and false lengths are rejected without
//! panicking, and without allocating memory for the claimed length.

use std::borrow::Cow;
use std::io::Cursor;
use std::ops::Range;

use proptest::prelude::*;
use serde_json::json;

use super::frame::{Frame, read_frame};
use super::wire::*;
use super::*;

fn questions() -> Vec<Question<'static>> {
    let chat = Chat {
        messages: vec![json!({ "role": "user", "content": "é\u{0}\n", "n": [1, -2.5, 1e300, null] })],
        tools: json!([{ "b": 1, "a": true }]),
    };
    vec![
        Question::Encode { texts: vec!["", "a", "é\n"], special: true, places: false },
        Question::Encode { texts: vec![], special: false, places: true },
        Question::Decode { tokens: vec![Cow::Owned(vec![0, u32::MAX]), Cow::Owned(vec![])] },
        Question::LargestToken,
        Question::TokenId("</s>"),
        Question::Render { chats: vec![Cow::Owned(chat.clone()), Cow::Owned(chat)], form: ChatForm::Marked },
    ]
}

fn answers() -> Vec<Result<Answer, Fault>> {
    let fault = Fault { line: Some(3), reason: "fails".into(), remedy: "mend it".into() };
    let rendered = RenderedText { text: "abc".into(), assistant: vec![0..1, 2..3] };
    vec![
        Ok(Answer::Encoded(vec![
            Encoded { ids: vec![1, 2], places: vec![[0, 1], [1, 3]] },
            Encoded::default(),
        ])),
        Ok(Answer::Decoded(vec!["x".into(), String::new()])),
        Ok(Answer::LargestToken(None)),
        Ok(Answer::TokenId(Some(7))),
        Ok(Answer::Rendered(vec![Ok(rendered), Err(fault.clone())])),
        Err(fault),
    ]
}

fn sent(frame: &Frame<'_>) -> Vec<u8> {
    let mut pipe = Vec::new();
    frame.write_to(&mut pipe).unwrap();
    assert_eq!(pipe.len() as u64, frame.len() + 8);
    let received = read_frame(&mut Cursor::new(&pipe), frame.len()).unwrap().unwrap();
    assert_eq!(received, frame.concat());
    assert!(read_frame(&mut Cursor::new(&pipe), frame.len().saturating_sub(1)).is_err() || frame.len() == 0);
    received
}

#[test]
fn what_is_sent_is_received() {
    for question in questions() {
        let bytes = sent(&write_question(&question));
        assert_eq!(read_question(&bytes), Some(question));
    }
    for answer in answers() {
        assert_eq!(read_answer(&sent(&write_answer(&answer))), Some(answer));
    }
    for content in [
        Content::Tokenizer(b"{}".to_vec()),
        Content::Template { source: "{{ 1 }}".into(), tokens: vec![("eos_token".into(), "</s>".into())] },
    ] {
        let loadable = Loadable { path: "a/b".into(), content };
        assert_eq!(read_load(&sent(&write_load(&loadable, 5))), Some((loadable.clone(), 5)));
    }
}

#[test]
fn an_answer_belongs_to_its_question() {
    let rendered = |assistant| {
        let text = RenderedText { text: "abc".into(), assistant };
        Answer::Rendered(vec![Ok(text.clone()), Ok(text)])
    };
    let encode = |places| Question::Encode { texts: vec!["a"], special: true, places };
    let encoded = |places| Answer::Encoded(vec![Encoded { ids: vec![1], places }]);
    let render = &questions()[5];
    for (question, answer, fits) in [
        (&encode(true), &encoded(vec![[0, 1]]), true),
        (&encode(false), &encoded(vec![]), true),
        (&encode(true), &encoded(vec![]), false),
        (&encode(false), &encoded(vec![[0, 1]]), false),
        (&encode(false), &Answer::Encoded(vec![]), false),
        (&Question::LargestToken, &Answer::TokenId(None), false),
        (render, &rendered(vec![0..1, 1..3]), true),
        (render, &rendered(vec![0..1, 1..4]), false),
        (render, &rendered(vec![1..2, 0..1]), false),
        (render, &rendered(vec![Range { start: 2, end: 1 }]), false),
        (render, &Answer::Rendered(vec![]), false),
    ] {
        assert_eq!(question.fits(answer), fits, "{question:?} {answer:?}");
    }
}

#[test]
fn false_lengths_cost_nothing() {
    // A frame that claims a length of 2^60 bytes, and one with a list that claims as many items.
    let mut endless = (1_u64 << 60).to_le_bytes().to_vec();
    endless.extend([0; 100]);
    assert!(read_frame(&mut Cursor::new(&endless), 1 << 20).is_err());
    assert!(read_frame(&mut Cursor::new(&endless), u64::MAX).is_err());
    for kind in [0_u64, 1, 4] {
        let message: Vec<u8> = [kind, 1 << 60, 1, 1].into_iter().flat_map(u64::to_le_bytes).collect();
        assert_eq!(read_answer(&message), None);
    }
    assert!(read_frame(&mut Cursor::new(&[1, 0]), 8).is_err(), "cut within the length");
    assert!(read_frame(&mut Cursor::new(&[]), 8).unwrap().is_none());
}

proptest! {
    #[test]
    fn invalid_messages_are_refused(cut in 0_usize..400, at in 0_usize..400, with: u8) {
        for question in questions() {
            let mut bytes = write_question(&question).concat();
            bytes.truncate(cut);
            let cut_short = bytes.len() < write_question(&question).concat().len();
            prop_assert!(!cut_short || read_question(&bytes).is_none());
        }
        for answer in answers() {
            let mut bytes = write_answer(&answer).concat();
            if let Some(byte) = bytes.get_mut(at) {
                *byte = with;
            }
            let _ = read_answer(&bytes);
            let longer = [write_answer(&answer).concat(), vec![0]].concat();
            prop_assert!(read_answer(&longer).is_none());
        }
    }

    #[test]
    fn any_bytes_are_checked(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = (read_answer(&bytes), read_question(&bytes), read_load(&bytes));
    }
}
