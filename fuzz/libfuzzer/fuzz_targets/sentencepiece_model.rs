#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| quant_fuzz::sentencepiece_model(data));
