-- For what a copy was posted: a tier's channel ('' is the bot's own, which may change), or the member whose conversation
-- it is in. NULL: nobody noted it.
ALTER TABLE messages ADD COLUMN place text;
