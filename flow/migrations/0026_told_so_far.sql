-- How far a notice with many copies has come, so that one that is tried again goes on from there: the id of the notice
-- and its version, of the card that this message shows, and of the outcome or reminder that stands below it.
-- NULL: neither was noted, which says nothing of what is there.
ALTER TABLE messages
    ADD COLUMN shown bigint[] CHECK (cardinality(shown) = 2),
    ADD COLUMN said  bigint[] CHECK (cardinality(said) = 2);
