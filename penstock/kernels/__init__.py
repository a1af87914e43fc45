"""Operations for which a kernel of their own pays: a folder each, with a plain reference that says what is computed."""
